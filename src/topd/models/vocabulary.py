"""Bytes of every token id, so that a run folder can be read without the model."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from topd.models.language_model import LanguageModel


def entries(model: LanguageModel) -> Iterator[tuple[int, bytes, bool]]:
    """(id, bytes, special) of all entries of a model's tokenizer, by id; special tokens are format markers, not text."""
    tokenizer = model.tokenizer
    added = tokenizer.added_tokens_decoder
    special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    spell = _spelling(tokenizer)
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        text = str(added[token_id]).encode() if token_id in added else spell(token, token_id)
        yield token_id, text, token_id in special


def _spelling(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, int], bytes]:
    """Function from a tokenizer entry to its bytes, chosen by the tokenizer's decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
    if "ByteLevel" in kinds:
        return partial(_byte_level, {char: byte for byte, char in bytes_to_unicode().items()})
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    return lambda token, token_id: str(tokenizer.decode([token_id])).encode()


def _kinds(decoder: dict[str, object]) -> set[str]:
    parts = decoder.get("decoders")
    inner = set().union(*map(_kinds, parts)) if isinstance(parts, list) else set()
    return {str(decoder.get("type"))} | inner


def _byte_level(byte_of: dict[str, int], token: str, token_id: int) -> bytes:
    """GPT-2's spelling: one printable character per byte."""
    try:
        return bytes(byte_of[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str, token_id: int) -> bytes:
    """SentencePiece's spelling: U+2581 is a space; <0x0A> is a byte."""
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()
