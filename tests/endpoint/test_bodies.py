"""Answers that are longer, or take more memory, than a request can need: not read to their end, and never believed."""

import gzip
import json
import tracemalloc

import pytest

from tests.endpoint.proxy import Reply, proxying
from tests.endpoint.test_replica import MODELS, NOWHERE, send
from topd.endpoint import replica as module
from topd.endpoint.bodies import parsed_bytes
from topd.endpoint.dialects import DIALECTS, Sglang, TopdScore, VllmPromptLogprobs
from topd.endpoint.faults import BadAnswer, Fault, Unavailable
from topd.endpoint.replica import ANSWER_PER_TOKEN, MAX_ANSWER, MAX_ERROR, Request
from topd.models.logprobs import Tokens

PEAK = 50_000_000
BLOCK = b"<p>" + b"x" * 65_000


@pytest.fixture(scope="module")
def proxy():
    with proxying(NOWHERE) as proxy:
        yield proxy


def endless(status=200, **headers):
    """A body without end, and without a Content-Length; ends when the client hangs up."""

    async def fault(exchange):
        lines = [f"HTTP/1.1 {status} Said", *(f"{key}: {value}" for key, value in headers.items()), "connection: close"]
        exchange.writer.write("\r\n".join([*lines, "", ""]).encode())
        for _ in range(4000):  # 260 MB
            exchange.writer.write(BLOCK)
            await exchange.writer.drain()

    return fault


def answering(body, status=200, headers=None):
    async def fault(exchange):
        return Reply(status, body, headers or {})

    return fault


def fault_and_peak(proxy, fault, request=MODELS, **options):
    """What `send` raises, and the bytes this process took for it at most (the proxy's are among them)."""
    proxy.give(lambda number: fault, "models")
    tracemalloc.start()
    try:
        with pytest.raises(Fault) as caught:
            send(proxy.url, request, **options)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_identity_is_asked_for(proxy):
    proxy.give(lambda number: answering(b"{}"), "models")
    send(proxy.url)
    assert proxy.requests[-1].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [200, 500])
def test_a_compressed_answer_is_refused_unread(proxy, status):
    bomb = gzip.compress(b"0" * 20_000_000, 1)

    found, peak = fault_and_peak(proxy, answering(bomb, status, {"content-encoding": "gzip"}))
    assert type(found) is BadAnswer
    assert "compressed" in str(found)
    assert peak < 5_000_000


def test_an_error_page_is_read_to_its_beginning(proxy):
    found, peak = fault_and_peak(proxy, endless(500))
    assert type(found) is Unavailable
    assert "answered 500: <p>xxx" in str(found)
    assert len(str(found)) < 400
    assert peak < 5_000_000


def test_an_answer_without_end_is_cut_where_no_answer_can_reach(proxy):
    found, peak = fault_and_peak(proxy, endless())
    assert type(found) is BadAnswer
    assert "longer than the 4 MB" in str(found)
    assert peak < PEAK


def test_no_part_of_a_key_is_shown_where_an_error_page_was_cut(proxy):
    key = "sk-4f1c0ffee"
    body = key.encode() + b" " * (MAX_ERROR - len(key) - 5) + key.encode() + b"x" * 100
    proxy.give(lambda number: answering(body, 500), "models")
    with pytest.raises(Unavailable) as caught:
        send(proxy.url, api_key=key)
    assert str(caught.value).endswith("answered 500: [the key]")


def test_an_answer_of_many_small_values_is_refused_before_it_is_parsed(proxy, monkeypatch):
    body = b"[" + b"[]," * 1_000_000 + b"0]"
    proxy.give(lambda number: answering(body), "models")
    assert send(proxy.url).content == body
    monkeypatch.setattr(module, "MAX_PARSED", 10_000_000)
    with pytest.raises(BadAnswer, match=r"would take \d+ MB of memory"):
        send(proxy.url)


def test_the_length_of_an_answer_follows_from_the_tokens_asked_for(proxy):
    group = Tokens((5, 6, 7), ((1, 2), (3,)))
    tokens = {type(dialect): dialect.encode([group], model="m", temperature=1.0).num_tokens for dialect in DIALECTS}
    assert tokens[TopdScore] == 3
    assert tokens[VllmPromptLogprobs] == tokens[Sglang] == 9
    request = Request(path="/v1/models", method="GET", num_tokens=1000)
    assert request.max_bytes == MAX_ANSWER + 1000 * ANSWER_PER_TOKEN
    body = b" " * (MAX_ANSWER + 1)
    proxy.give(lambda number: answering(body), "models")
    assert send(proxy.url, request).content == body
    with pytest.raises(BadAnswer, match="longer"):
        send(proxy.url)


LISTS = ("[]", "{}", "12345", "0.1", '{"a":0}', "[[[[1234]]]]")


@pytest.mark.parametrize(
    "text",
    [
        *(f"[{(value + ',') * 4999}0]" for value in LISTS),
        json.dumps({str(n): n + 1000 for n in range(4999)}),
        json.dumps([str(n) for n in range(4999)]),
        '["' + "a" * 99999 + '\\ud83d\\ude00"]',
    ],
)
def test_no_json_takes_more_memory_than_is_estimated(text):
    body = text.encode()
    tracemalloc.start()
    try:
        json.loads(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= parsed_bytes(body) <= 20 * peak
