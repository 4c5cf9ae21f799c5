"""What waits, what runs together, what is turned away."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.fakes import make_prompt, ragged_groups
from tests.serve.serving import running, serving, wait_until
from topd.rollout.engine import SamplingParams
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import ApiError
from topd.serve.queue import TaskQueue
from topd.serve.work import SAMPLING_ROWS, Reload, Sampling, Scoring

SCORE = {"groups": [{"prompt": [5, 6], "completions": [[7, 8]]}]}
LONG = {"prompt": [[2]] * 4, "n": SAMPLING_ROWS, "max_tokens": 250, "temperature": 2, "seed": 1}


@pytest.fixture
def queue():
    return TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20)


def scoring(*shapes, **settings):
    return Scoring(groups=tuple(ragged_groups(*shapes)), **settings)


def sampling(n=1, **settings):
    return Sampling(prompt=make_prompt((2, 3)), params=SamplingParams(n=n, max_tokens=4, **settings))


# --- the queue alone


def test_scoring_runs_together_up_to_a_limit_if_it_is_of_one_kind(queue):
    works = [scoring((2, (6,))), scoring((2, (6,)), temperature=0.5), scoring((2, (4, 2))), scoring((2, (6,)))]
    tasks = [task for work in works for task in queue.submit([work])]
    assert queue.next() == [tasks[0], tasks[2]]  # 16 of 20 tokens
    assert queue.next() == [tasks[1]]
    assert queue.next() == [tasks[3]]


def test_one_request_larger_than_a_batch_runs_alone(queue):
    [large] = queue.submit([scoring((2, (60,)))])
    [small] = queue.submit([scoring((2, (1,)))])
    assert queue.next() == [large]
    assert queue.next() == [small]


def test_ranks_and_plain_scores_do_not_mix(queue):
    tasks = [queue.submit([scoring((1, (1,)), top_k=k)])[0] for k in (None, 0, 5, None)]
    assert queue.next() == [tasks[0], tasks[3]]
    assert queue.next() == [tasks[1], tasks[2]]


def test_sampling_runs_together_up_to_a_number_of_rows(queue):
    works = [sampling(n=SAMPLING_ROWS // 2) for _ in range(3)]
    other = sampling(n=SAMPLING_ROWS // 2, temperature=0.5)
    tasks = queue.submit([works[0], other, *works[1:]])
    assert queue.next() == [tasks[0], tasks[2]]
    assert queue.next() == [tasks[1]]
    assert queue.next() == [tasks[3]]


def test_scoring_and_sampling_take_turns_and_new_weights_come_first(queue, tmp_path):
    queue.submit([sampling(temperature=0.5 + i) for i in range(3)])
    for i in range(2):
        queue.submit([scoring((1, (1,)), temperature=1.0 + i)])
    queue.submit([Reload(folder=tmp_path)])
    order = [type(queue.next()[0].work) for _ in range(6)]
    assert order == [Reload, Sampling, Scoring, Sampling, Scoring, Sampling]


def test_a_paused_queue_gives_out_new_weights_alone(queue, tmp_path):
    queue.pause(abort=False)
    [waiting] = queue.submit([scoring((1, (1,)))])
    [reload] = queue.submit([Reload(folder=tmp_path)])
    assert queue.next() == [reload]
    assert queue.take(Scoring) == []
    queue.resume()
    assert queue.next() == [waiting]


def test_what_is_withdrawn_is_not_given_out(queue):
    tasks = queue.submit([scoring((1, (1,))), sampling()])
    queue.withdraw(tasks)
    [kept] = queue.submit([scoring((1, (2,)))])
    assert queue.next() == [kept]
    assert queue.take(Sampling) == []
    queue.withdraw([kept])
    with pytest.raises(ApiError, match="left"):
        queue.check([kept])


def test_pause_returns_when_nothing_runs(queue):
    queue.submit([scoring((1, (1,)))])
    batch = queue.next()
    paused = threading.Thread(target=queue.pause, kwargs={"abort": True})
    paused.start()

    def is_aborted():
        try:
            queue.check(batch)
        except ApiError as error:
            return error.status == 503
        return False

    wait_until(is_aborted)
    assert paused.is_alive()
    queue.finished()
    paused.join(10)
    assert not paused.is_alive()
    queue.check(batch)


def test_a_closed_queue_refuses_all(queue):
    [waiting] = queue.submit([scoring((1, (1,)))])
    queue.close(0.0)
    assert waiting.future.exception().status == 503
    assert queue.next() == []
    with pytest.raises(ApiError, match="shutting down") as caught:
        queue.submit([scoring((1, (1,)))])
    assert caught.value.status == 503


def test_bounds(monkeypatch):
    queue = TaskQueue(ServerMetrics(), max_requests=2, max_batch_tokens=20)
    queue.submit([sampling(), sampling()])  # one request
    queue.submit([sampling()])
    with pytest.raises(ApiError, match="full") as caught:
        queue.submit([sampling()])
    assert caught.value.status == 429
    monkeypatch.setattr("topd.serve.queue.MAX_TOKENS", 20)
    queue = TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20)
    with pytest.raises(ApiError, match="split") as caught:
        queue.submit([scoring((2, (19,)))])
    assert caught.value.status == 413
    queue.submit([scoring((2, (15,)))])
    with pytest.raises(ApiError, match="full"):
        queue.submit([scoring((2, (3,)))])
    queue.next()
    queue.submit([scoring((2, (3,)))])


def test_the_time_to_wait_follows_the_measured_rate():
    queue = TaskQueue(ServerMetrics(), max_requests=1, max_batch_tokens=20)

    def wait():
        with pytest.raises(ApiError) as caught:
            queue.submit([scoring((1, (1,)))])
        return caught.value.retry_after

    queue.submit([scoring((1, (9,)))])
    assert wait() == 1
    queue.took(queue._waiting[Scoring], seconds=100.0)
    assert wait() == 30
    for _ in range(20):
        queue.took(queue._waiting[Scoring], seconds=12.0)
    assert wait() == 12


# --- over HTTP


def num_queued(base):
    page = httpx2.get(base.replace("/v1", "/metrics")).text
    return float(next(line.split()[1] for line in page.splitlines() if line.startswith("topd_serve_queued_requests ")))


@pytest.fixture
def paused(tiny_model):
    """(base URL, resume): a server that lets at most two requests wait, and runs none."""
    with serving(tiny_model("qwen3"), max_queue=2, allow_reload=True) as base:
        root = base.removesuffix("/v1")
        assert httpx2.post(f"{root}/pause?mode=keep").json() == {"status": "paused"}
        yield base, lambda: httpx2.post(f"{root}/resume")


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


def test_a_client_that_leaves_takes_its_work_along(paused):
    base, resume = paused
    body = httpx2.Request("POST", base, json=SCORE).read()
    send_and_leave(base, "/v1/score", body, lambda: num_queued(base) == 1)
    wait_until(lambda: num_queued(base) == 0)
    resume()
    page = httpx2.get(base.replace("/v1", "/metrics")).text
    assert "topd_serve_scored_tokens_total 0.0" in page
    assert 'topd_serve_requests_total{route="/v1/score",status="499"} 1.0' in page


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
        httpx2.post(base.replace("/v1", "/pause"))
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
