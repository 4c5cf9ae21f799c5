"""Clients of a busy or stopping server: who waits, who is turned away, who leaves, who may ask."""

import contextlib
import gc
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.serve.serving import running, serving, wait_until
from topd.serve.work import SAMPLING_ROWS

SCORE = {"groups": [{"prompt": [5, 6], "completions": [[7, 8]]}]}
LONG = {"prompt": [[2]] * 4, "n": SAMPLING_ROWS, "max_tokens": 250, "temperature": 2, "seed": 1}


def num_queued(base):
    page = httpx2.get(base.replace("/v1", "/metrics")).text
    return float(next(line.split()[1] for line in page.splitlines() if line.startswith("topd_serve_queued_requests ")))


@pytest.fixture
def paused(tiny_model):
    """(base URL, resume): a server that lets at most two requests wait, and runs none."""
    with serving(tiny_model("qwen3"), max_queue=2, allow_reload=True) as base:
        root = base.removesuffix("/v1")
        assert httpx2.post(f"{root}/pause?mode=keep", json={}).json() == {"status": "paused"}
        yield base, lambda: httpx2.post(f"{root}/resume", json={})


def test_a_full_queue_answers_429_with_a_time_to_wait(paused):
    base, resume = paused
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx2.post, f"{base}/score", json=SCORE, timeout=30) for _ in range(2)]
        wait_until(lambda: num_queued(base) == 2)
        response = httpx2.post(f"{base}/completions", json={"prompt": [5]})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert response.json()["error"]["type"] == "RateLimitError"
        resume()
        assert [future.result().status_code for future in waiting] == [200, 200]
    assert httpx2.post(f"{base}/completions", json={"prompt": [5]}).status_code == 200


def send_and_leave(base, path, body, when):
    """A client that hangs up."""
    host, port = base.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_until(when)


def test_a_client_that_leaves_takes_its_work_along(paused, caplog):
    base, resume = paused
    caplog.set_level(logging.ERROR, logger="asyncio")
    body = httpx2.Request("POST", base, json=SCORE).read()
    send_and_leave(base, "/v1/score", body, lambda: num_queued(base) == 1)
    wait_until(lambda: num_queued(base) == 0)
    resume()
    page = httpx2.get(base.replace("/v1", "/metrics")).text
    assert "topd_serve_scored_tokens_total 0.0" in page
    assert 'topd_serve_requests_total{route="/v1/score",status="499"} 1.0' in page
    gc.collect()
    assert caplog.text == ""  # asyncio complains of results that nobody read


def test_a_client_that_leaves_ends_what_runs_for_it(tiny_model):
    with running(tiny_model("qwen3")) as (base, server):
        body = httpx2.Request("POST", base, json=LONG).read()
        generated = server.worker._metrics.generated
        send_and_leave(base, "/v1/completions", body, lambda: generated._value.get() > 0)
        wait_until(lambda: not server.worker.queue._running)
        assert generated._value.get() < SAMPLING_ROWS * 250
        assert httpx2.post(f"{base}/score", json=SCORE).status_code == 200


def test_pause_with_abort_answers_503_to_what_waits(paused):
    base, resume = paused
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx2.post, f"{base}/score", json=SCORE, timeout=30)
        wait_until(lambda: num_queued(base) == 1)
        httpx2.post(base.replace("/v1", "/pause"), json={})
        assert waiting.result().status_code == 503
    resume()
    assert httpx2.post(f"{base}/score", json=SCORE).status_code == 200


def test_a_request_that_fails_does_not_fail_its_company(paused, monkeypatch):
    from topd.serve import worker

    def fragile(model, groups, **settings):
        if any(group.prompt_ids == (9,) for group in groups):
            raise RuntimeError("this prompt breaks it")
        return sound(model, groups, **settings)

    sound = worker.score_groups
    monkeypatch.setattr(worker, "score_groups", fragile)
    base, resume = paused
    requests = [SCORE, {"groups": [{"prompt": [9], "completions": [[7]]}]}]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx2.post, f"{base}/score", json=request, timeout=30) for request in requests]
        wait_until(lambda: num_queued(base) == 2)
        resume()
        assert [future.result().status_code for future in waiting] == [200, 500]


def test_a_server_that_stops_refuses_what_waits_and_finishes_what_runs(tiny_model):
    with ThreadPoolExecutor(2) as pool:
        with running(tiny_model("qwen3")) as (base, server):
            short = {"prompt": [5], "max_tokens": 250, "n": 8, "seed": 3}
            runs = pool.submit(httpx2.post, f"{base}/completions", json=short, timeout=30)
            wait_until(lambda: server.worker.queue._running)
            server.worker.queue._paused = True  # so that the next one waits
            waits = pool.submit(httpx2.post, f"{base}/completions", json=short, timeout=30)
            wait_until(lambda: num_queued(base) == 1)
        assert runs.result().status_code == 200
        assert waits.result().status_code == 503


def test_a_server_that_stops_waits_for_no_body(tiny_model, monkeypatch, caplog):
    monkeypatch.setattr("topd.serve.server.GRACE_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(serving(tiny_model("qwen3")))
        host, port = base.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.2)
            stack.close()
            assert slow.recv(100).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in caplog.text


def test_a_server_that_stops_ends_a_long_job(tiny_model, monkeypatch):
    monkeypatch.setattr("topd.serve.server.GRACE_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as pool:
        with running(tiny_model("qwen3")) as (base, server):
            runs = pool.submit(httpx2.post, f"{base}/completions", json=LONG, timeout=30)
            wait_until(lambda: server.worker.queue._running)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        assert runs.result().status_code == 503


def test_token(tiny_model, caplog):
    with serving(tiny_model("qwen3"), token="s3cret") as base, caplog.at_level(logging.DEBUG):
        root = base.removesuffix("/v1")
        assert httpx2.get(f"{root}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Basic s3cret"}):
            response = httpx2.get(f"{base}/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "AuthenticationError"
            assert response.headers["www-authenticate"] == "Bearer"
            assert httpx2.get(f"{root}/metrics", headers=headers).status_code == 401
        allowed = {"Authorization": "Bearer s3cret"}
        assert httpx2.get(f"{base}/models", headers=allowed).status_code == 200
        response = httpx2.post(f"{base}/completions", json={"prompt": [5], "max_tokens": 1}, headers=allowed)
        assert response.status_code == 200
        assert "s3cret" not in httpx2.get(f"{root}/metrics", headers=allowed).text
    assert "s3cret" not in caplog.text
