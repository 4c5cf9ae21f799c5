"""Whether two models know the same tokens: by their tokenizers, or by what a server makes of ids."""

import dataclasses

import pytest

from tests.fakes import CHARACTERS, EOS, VOCAB, make_model, make_tokenizer
from topd.teacher import fit
from topd.teacher.fit import check_decoding, check_end_tokens, check_tokenizer, check_vocabulary


@pytest.fixture(scope="module")
def student():
    return make_model()


def counted(decode):
    calls = []
    return lambda ids: calls.append(len(ids)) or decode(ids), calls


def test_a_server_that_decodes_alike_has_the_same_tokens(student):
    decode, calls = counted(student.tokenizer.decode)
    check = check_decoding(student, decode)
    assert (check.ok, calls) == (True, [VOCAB])
    assert f"all {VOCAB} tokens" in check.detail


def test_a_large_vocabulary_is_asked_for_in_parts(student, monkeypatch):
    monkeypatch.setattr(fit, "DECODED_AT_ONCE", 7)
    decode, calls = counted(student.tokenizer.decode)
    assert check_decoding(student, decode).ok
    assert sum(calls) == VOCAB
    assert max(calls) == 7


@pytest.mark.parametrize("at_once", [7, 512])
@pytest.mark.parametrize("token", [2, 20, VOCAB - 1])
def test_one_token_that_differs_is_found_and_shown(student, monkeypatch, token, at_once):
    monkeypatch.setattr(fit, "DECODED_AT_ONCE", at_once)

    def decode(ids):
        return "".join("?" if i == token else student.tokenizer.decode([i]) for i in ids)

    check = check_decoding(student, decode)
    assert not check.ok
    assert f"token {token} is {CHARACTERS[token - 2]!r} for the student and '?' for the teacher's server" in check.detail


def test_two_tokens_that_have_changed_places_are_found(student):
    a, b = 5, 6
    places = {a: b, b: a}
    check = check_decoding(student, lambda ids: student.tokenizer.decode([places.get(i, i) for i in ids]))
    assert not check.ok
    assert f"token {a} is" in check.detail


def test_a_server_that_decodes_everything_to_nothing_is_refused(student):
    assert not check_decoding(student, lambda ids: "").ok


def test_tokenizers_must_have_the_same_tokens_with_the_same_ids(student):
    assert check_tokenizer(student, make_tokenizer()).ok
    longer = make_tokenizer()
    longer.add_tokens(["more"])
    check = check_tokenizer(student, longer)
    assert not check.ok
    assert f"student has {VOCAB} tokens, teacher {VOCAB + 1}; 1 differ in id or exist on one side only ('more')" in check.detail


def test_an_embedding_smaller_than_the_vocabulary_is_refused(student):
    small = make_model(vocab_size=VOCAB - 2)
    check = check_vocabulary(student, dataclasses.replace(small, vocab_size=VOCAB))
    assert not check.ok
    assert f"teacher has {VOCAB - 2} embedding rows for token ids up to {VOCAB - 1}" in check.detail


def test_end_tokens_are_shown_as_words(student):
    assert "both end with '<eos>' (1)" in check_end_tokens(student, [EOS], False).detail
    refused = check_end_tokens(student, [4], False)
    assert not refused.ok
    assert "the student ends with '<eos>' (1), the teacher with '2' (4)" in refused.detail
    assert "map_eos = true in the teacher's section" in refused.detail
