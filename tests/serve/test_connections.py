"""Rude clients on the wire: tiny chunks, requests that never end, answers that nobody reads, too many of them."""

import asyncio
import contextlib
import logging
import time

import httpx2
import pytest

from tests.serve.serving import running, wait_until
from tests.serve.test_limits import api, is_closed, raw
from topd.serve import app, connection, guard
from topd.serve.answers import to_json
from topd.serve.connection import CHUNK_BYTES, SMALL_CHUNKS

CHUNKED = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = 16_000_000
"""Bytes that no socket's buffer holds."""


@pytest.fixture(scope="module")
def server(tiny_model):
    with running(tiny_model("qwen3")) as (base, server):
        yield base, server


@pytest.fixture
def errors(caplog):
    caplog.set_level(logging.ERROR)
    yield
    assert caplog.get_records("call") == []


def health(base):
    return httpx2.get(base.replace("/v1", "/health"), timeout=10).status_code


def answer(connected):
    """All that comes until the server closes."""
    content = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connected.recv(1 << 20):
            content += piece
    return bytes(content)


def chunks(body, size):
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


# --- bodies


def test_a_body_in_tiny_chunks_is_refused_before_it_costs_much(server, errors):
    with raw(server[0]) as connected:
        with contextlib.suppress(ConnectionError):
            connected.sendall(CHUNKED + chunks(b" " * 30 * SMALL_CHUNKS, 1))
        assert answer(connected).startswith(b"HTTP/1.1 400")
    assert health(server[0]) == 200


@pytest.mark.parametrize("size", [1, CHUNK_BYTES])
def test_a_body_in_few_or_in_larger_chunks_is_read(server, size):
    num_chunks = SMALL_CHUNKS // 2 if size == 1 else 3 * SMALL_CHUNKS
    body = b" " * num_chunks * size + to_json({"groups": [{"prompt": [5], "completions": [[6]]}]})
    with raw(server[0]) as connected:
        content = b""
        for number in (1, 2):  # each request has its own allowance
            connected.sendall(CHUNKED + chunks(body, size))
            while content.count(b"HTTP/1.1 200") < number:
                content += (piece := connected.recv(1 << 16))
                assert piece


@pytest.mark.parametrize("rest", [b"1\r\n \r\n", b"0\r\na: b\r\n"], ids=["chunks", "trailers"])
def test_a_request_that_goes_on_after_408_ends_with_it(server, monkeypatch, errors, rest):
    monkeypatch.setattr(app, "BODY_S", 0.2)
    with raw(server[0]) as connected:
        connected.sendall(CHUNKED + rest)
        content, start = b"", time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < start + 5:
                connected.sendall(rest[-6:])
                connected.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if not (piece := connected.recv(1 << 16)):
                        break
                    content += piece
    assert time.monotonic() < start + 3
    assert content.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_broken_body_behind_an_answer_ends_the_connection_without_a_traceback(server, errors, at_once):
    head = CHUNKED.replace(b"/v1/score", b"/nothing")
    with raw(server[0]) as connected:
        connected.sendall(head + b"no chunk\r\n" if at_once else head)
        if not at_once:
            assert connected.recv(1 << 16).startswith(b"HTTP/1.1 404")
            connected.sendall(b"no chunk\r\n")
        assert not answer(connected).startswith(b"HTTP/1.1 404")
    assert health(server[0]) == 200


# --- answers


@pytest.fixture
def large(server, monkeypatch):
    """(base URL, budget): /detokenize answers LARGE bytes, whatever is asked."""
    monkeypatch.setattr(app, "to_json", lambda content: to_json({"prompt": "x" * LARGE}))
    return server[0], api(server[1]).budget


def ask(connected, *, close=False):
    body = b'{"tokens":[5]}'
    head = f"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    connected.sendall(head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + body)


def test_a_large_answer_arrives_whole_and_counts_until_it_is_read(large):
    base, budget = large
    with raw(base) as connected:
        ask(connected, close=True)
        wait_until(lambda: budget.taken > LARGE)
        time.sleep(0.05)
        assert budget.taken > LARGE
        head, _, body = answer(connected).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    assert len(body) > LARGE
    wait_until(lambda: budget.taken == 0)


def test_two_large_answers_on_one_connection(large):
    base, budget = large
    with raw(base) as connected:
        ask(connected)
        ask(connected, close=True)  # before the first is read
        content = answer(connected)
    assert content.count(b"HTTP/1.1 200 OK") == 2
    assert len(content) > 2 * LARGE
    wait_until(lambda: budget.taken == 0)


def test_a_client_that_does_not_read_is_dropped_and_its_share_is_given_back(large, monkeypatch, errors):
    base, budget = large
    monkeypatch.setattr(guard, "ANSWER_S", 0.2)
    monkeypatch.setattr(guard, "BYTES_PER_S", 1e9)
    with raw(base) as connected:
        ask(connected)
        wait_until(lambda: budget.taken > LARGE)
        wait_until(lambda: budget.taken == 0, seconds=3)
        with pytest.raises(ConnectionResetError):  # nothing is left in the system's buffers either
            while connected.recv(1 << 16):
                pass


def test_an_answer_for_which_there_is_no_room_is_refused(large):
    base, budget = large
    budget.taken += budget.limit - LARGE
    try:
        response = httpx2.post(base.replace("/v1", "/detokenize"), json={"tokens": [5]})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
    finally:
        budget.taken -= budget.limit - LARGE
    assert budget.taken == 0
    assert httpx2.post(base.replace("/v1", "/detokenize"), json={"tokens": [5]}).status_code == 200


def test_a_client_that_asks_much_and_reads_nothing_is_dropped(server, monkeypatch, errors):
    """Each answer is small; together they fill every buffer."""
    monkeypatch.setattr(guard, "ANSWER_S", 0.2)
    with raw(server[0]) as connected:
        connected.settimeout(0.1)
        own = connected.getsockname()[:2]
        with contextlib.suppress(OSError):
            for _ in range(200):
                connected.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200)

        def is_served():
            return any(one.client == own for one in list(server[1].server_state.connections))

        assert is_served()
        wait_until(lambda: not is_served(), seconds=20)


# --- room


def test_a_connection_whose_body_drips_makes_room(server, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    head = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    with contextlib.ExitStack() as stack:
        dripping = [stack.enter_context(raw(server[0])) for _ in range(3)]
        for one in dripping:
            one.sendall(head)
        budget = api(server[1]).budget
        for one in dripping:
            one.sendall(b" ")
        wait_until(lambda: budget.taken == 3)
        assert health(server[0]) == 200
        assert is_closed(dripping[0])
        wait_until(lambda: budget.taken == 2)


# --- one at a time


def test_requests_are_parsed_and_answered_beside_the_event_loop_one_at_a_time(server, monkeypatch):
    """Else a large body stops all others, and two take their memory at the same time."""
    running_now, most = [0], [0]

    def watched(function):
        def call(*args, **kwargs):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            running_now[0] += 1
            most[0] = max(most[0], running_now[0])
            time.sleep(0.02)
            running_now[0] -= 1
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    calls: list[str] = []
    for name in (
        "parsed_bytes",
        "parse_json",
        "score_work",
        "score_answer",
        "completion_job",
        "completion_answer",
        "encode",
        "token_ids",
    ):
        monkeypatch.setattr(app, name, watched(getattr(app, name)))
    requests = {
        "/v1/score": {"groups": [{"prompt": [5], "completions": [[6]]}]},
        "/v1/completions": {"prompt": [5], "max_tokens": 1},
        "/tokenize": {"prompt": "1"},
        "/detokenize": {"tokens": [5]},
    }

    async def send_all():
        async with httpx2.AsyncClient(base_url=server[0].removesuffix("/v1"), timeout=30) as client:
            return await asyncio.gather(*(client.post(path, json=body) for path, body in requests.items() for _ in range(2)))

    assert [response.status_code for response in asyncio.run(send_all())] == [200] * 8
    assert most == [1]
    assert len(set(calls)) == 8
