"""What servers say of their models is used only if it has the right types, and can be true."""

import json
import tracemalloc

import pytest

from topd.endpoint.card import LARGEST, ServedCard, read_cards
from topd.endpoint.faults import BadAnswer

DIGEST = "0f" * 32


def read(content):
    return read_cards("http://h", content if isinstance(content, bytes) else json.dumps(content).encode())


def card(own=None, **fields):
    return {"data": [{"id": "m", "object": "model", "permission": []} | fields | ({} if own is None else {"topd": own})]}


def test_a_card_says_what_the_server_knows_and_no_more():
    full = card({"fingerprint": DIGEST, "eos_token_ids": [1, 2], "new": 3}, root="r", max_model_len=256)
    expected = ServedCard(id="m", root="r", context_length=256, fingerprint=DIGEST, eos_token_ids=(1, 2))
    assert read(full) == [expected]
    bare = ServedCard(id="m", root="m", context_length=None, fingerprint=None, eos_token_ids=None)
    assert read(card()) == read(card({}, root=None, max_model_len=None)) == read(card({"eos_token_ids": None})) == [bare]
    assert read({"data": []}) == []


WRONG = {
    "data.0.topd.fingerprint": [{"topd": {"fingerprint": value}} for value in (5, {"a": 1}, ["a"], True, "", "x", DIGEST[1:])],
    "data.0.topd.eos_token_ids": [{"topd": {"eos_token_ids": value}} for value in ("12", 1, {}, [0] * 1001)],
    "data.0.topd.eos_token_ids.0": [
        {"topd": {"eos_token_ids": [value]}} for value in (-1, 10**30, LARGEST + 1, "1", 1.5, True, None)
    ],
    "data.0.topd": [{"topd": value} for value in ([1], "x", 1, True)],
    "data.0.max_model_len": [{"max_model_len": value} for value in (True, -5, 0, 1e30, 10**30, "256", 1.5, float("inf"), [1])],
    "data.0.id": [{"id": value} for value in (None, 5, "", "a\x1b[2J", "\u202em", "m" * 1001)],
    "data.0.root": [{"root": value} for value in (5, "a\nb", "\x9b1m", ["m"])],
}


@pytest.mark.parametrize(("where", "fields"), [(where, fields) for where, several in WRONG.items() for fields in several])
def test_a_value_of_a_wrong_type_or_size_is_a_fault_that_names_it(where, fields):
    with pytest.raises(BadAnswer) as caught:
        read(card(**fields))
    said = str(caught.value)
    assert said.startswith(f"http://h/v1/models returned no valid list of models: {where}: ")
    assert len(said) < 200
    assert said.isprintable()


BROKEN = [
    b"",
    b"<html>",
    b"[" * 100_000,
    b'{"data":[{"id":"m","x":' + b"1" * 5000 + b"}]}",
    b'{"data":[{"id":"\\ud800"}]}',
    b"\xff",
]


@pytest.mark.parametrize("content", [*BROKEN, {"data": None}, {"data": {"id": "m"}}, {"data": [1]}, [], {}, None])
def test_what_is_no_list_of_models_is_a_fault(content):
    with pytest.raises(BadAnswer, match="returned no valid list of models: "):
        read(content)


@pytest.mark.parametrize("content", [{"data": [1] * 1_000_000}, card({"eos_token_ids": [-1] * 1_000_000})], ids=["cards", "ids"])
def test_a_long_list_of_wrong_values_costs_no_more_than_the_first(content):
    body = json.dumps(content).encode()
    tracemalloc.start()
    with pytest.raises(BadAnswer):
        read(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
