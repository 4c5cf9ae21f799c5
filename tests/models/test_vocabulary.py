"""What token ids stand for: the bytes of a text's tokens, joined, are the text."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.fakes import CHARACTERS, make_model
from topd.models.vocabulary import entries

TEXTS = [
    "Hello  world\n\n\tx",
    "\U0001f469\u200d\U0001f680 漢字かな",
    "שלום \u202e é e\u0301",
    "\x00\x1b\x7f\xa0\u3000",
    " 1+2=3; ",
    "",
]
Entries = dict[int, tuple[bytes, bool]]


def entries_of(tokenizer: PreTrainedTokenizerFast) -> Entries:
    model = dataclasses.replace(make_model(), tokenizer=tokenizer)
    return {token_id: (raw, special) for token_id, raw, special in entries(model)}


def joined(tokenizer: PreTrainedTokenizerFast, found: Entries, text: str) -> bytes:
    return b"".join(found[token_id][0] for token_id in tokenizer.encode(text, add_special_tokens=False))


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Qwen and SmolLM: trained on some text, with every byte."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator([*TEXTS, "hello world, hello words"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.add_tokens(["<think> x", AddedToken("né", special=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


def sentencepiece(*more: str) -> PreTrainedTokenizerFast:
    """As Llama and Gemma: pieces with a lower block for a space, and one entry for every byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi", "漢", *more]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "h"), ("▁h", "i")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "漢": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.fixture(scope="module")
def of_bytes() -> tuple[PreTrainedTokenizerFast, Entries]:
    tokenizer = byte_level()
    return tokenizer, entries_of(tokenizer)


@pytest.fixture(scope="module")
def of_pieces() -> tuple[PreTrainedTokenizerFast, Entries]:
    tokenizer = sentencepiece()
    return tokenizer, entries_of(tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_text(of_bytes, of_pieces, text: str) -> None:
    for tokenizer, found in (of_bytes, of_pieces):
        assert joined(tokenizer, found, text) == text.encode()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_those_of_any_text_are(of_bytes, of_pieces, text: str) -> None:
    tokenizer, found = of_bytes
    assert joined(tokenizer, found, text) == text.encode()
    tokenizer, found = of_pieces
    assert joined(tokenizer, found, text.replace("▁", "")) == text.replace("▁", "").encode()


def test_every_byte_has_an_entry_of_its_own(of_bytes, of_pieces) -> None:
    for _, found in (of_bytes, of_pieces):
        assert {raw[0] for raw, special in found.values() if len(raw) == 1 and not special} == set(range(256))


def test_added_tokens_are_what_they_say_and_only_marks_of_the_format_are_special(of_bytes) -> None:
    tokenizer, found = of_bytes
    expected = {"<think> x": False, "né": False, "<|im_start|>": True, "<eos>": True}
    assert {text: found[tokenizer.convert_tokens_to_ids(text)] for text in expected} == {
        text: (text.encode(), special) for text, special in expected.items()
    }
    assert sum(special for _, special in found.values()) == 2
    assert joined(tokenizer, found, "a<|im_start|>né <think> x") == "a<|im_start|>né <think> x".encode()


def test_entries_stand_in_the_order_of_their_ids_and_are_all_there(of_bytes) -> None:
    tokenizer, found = of_bytes
    assert list(found) == sorted(found)
    assert set(found) == set(tokenizer.get_vocab().values()) == set(range(len(tokenizer)))


def test_an_entry_that_only_looks_like_a_byte_is_text() -> None:
    tokenizer = sentencepiece("<0xZZ>", "<0x_a>", "<0x+1>", "<0xA>", "<0x0a1>", "x<0x0A>")
    found = entries_of(tokenizer)
    for piece in ("<0xZZ>", "<0x_a>", "<0x+1>", "<0xA>", "<0x0a1>", "x<0x0A>"):
        assert found[tokenizer.convert_tokens_to_ids(piece)][0] == piece.encode()
    assert found[tokenizer.convert_tokens_to_ids("<0x0A>")] == (b"\n", False)
    assert found[tokenizer.convert_tokens_to_ids("<unk>")] == (b"<unk>", True)
    assert found[tokenizer.convert_tokens_to_ids("▁hi")] == (b" hi", False)


def test_a_byte_level_entry_with_another_character_is_its_own_text() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "漢": 1, "Ġa": 2, "Ċ": 3}, [], unk_token=None))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    found = entries_of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [raw for raw, _ in found.values()] == [b"a", "漢".encode(), b" a", b"\n"]


def test_other_tokenizers_say_it_by_decoding(tokenizer) -> None:
    found = entries_of(word_pieces())
    assert found[0] == (b"[UNK]", True)
    assert found[1] == (b"play", False)
    assert found[2][0].decode().removeprefix("##") == "ing"
    assert found[3] == ("漢".encode(), False)
    characters = entries_of(tokenizer)
    assert characters == {
        0: (b"<pad>", True),
        1: (b"<eos>", True),
        **{i + 2: (char.encode(), False) for i, char in enumerate(CHARACTERS)},
    }


def test_a_metaspace_decoder_is_read_like_pieces() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0), ("▁", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    found = entries_of(tokenizer)
    assert joined(tokenizer, found, " ab a") == b" ab a"


def test_a_tokenizer_without_a_decoder_is_read_by_decoding() -> None:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "ab": 1}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    assert entries_of(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")) == {
        0: (b"<pad>", True),
        1: (b"ab", False),
    }
