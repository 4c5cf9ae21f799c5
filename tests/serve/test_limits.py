"""Hostile clients: bodies that would take much memory, connections that never ask, folders that would block a reload."""

import contextlib
import os
import socket
import time
import tracemalloc

import httpx2
import pytest
import torch
from safetensors.torch import save_file

from tests.fakes import make_model, make_module
from tests.serve.serving import running, serving, wait_until
from tests.serve.test_reload import reload, scores, weights_only
from tests.serve.test_requests import JSON, refused
from topd.serve import connection, work
from topd.serve.answers import Spelling, completion_answer, to_json
from topd.serve.budget import Budget
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import MAX_CHOICES, MAX_MESSAGE, MAX_TEXT, ApiError, CompletionRequest, ScoreRequest, read
from topd.serve.queue import Task
from topd.serve.worker import Worker


@pytest.fixture(scope="module")
def server(tiny_model):
    with running(tiny_model("qwen3")) as (base, server):
        yield base, server


def api(server):
    return server.config.app.routes[0].endpoint.__self__


def post(base, path, content):
    return httpx2.post(base.removesuffix("/v1") + path, content=content, headers=JSON, timeout=30)


# --- bodies


def test_the_first_error_ends_the_reading_of_a_request():
    tracemalloc.start()
    try:
        for groups in ([[]] * 4000, [[]] * 400_000):
            with pytest.raises(ApiError, match=r"^groups"):
                read(ScoreRequest, {"groups": groups})
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (ScoreRequest, {"groups": [{"prompt": [5], "completions": [[6]]}] * (MAX_CHOICES + 1)}, "at most 4096"),
        (ScoreRequest, {"groups": [{"prompt": [5], "completions": [[6]] * (MAX_CHOICES + 1)}]}, "at most 4096"),
        (CompletionRequest, {"stop": ["a"] * 1025}, "stop"),
        (CompletionRequest, {"stop_token_ids": [1] * 1025}, "at most 1024"),
    ],
)
def test_lists_have_a_longest_length(kind, data, words):
    with pytest.raises(ApiError, match=words):
        read(kind, data)


@pytest.mark.parametrize(
    ("path", "content", "status", "words"),
    [
        ("/v1/score", b'{"groups":[' + b"[]," * 5_000_000 + b"0]}", 413, "MB of memory"),
        ("/v1/completions", b'{"prompt":["' + b'a","' * 5000 + b'"]}', 400, "5001 prompts"),
        ("/v1/completions", b'{"prompt":"' + b"1" * (MAX_TEXT + 1) + b'"}', 400, "more than 524288 bytes"),
        ("/tokenize", b'{"prompt":"' + b"1" * (MAX_TEXT + 1) + b'"}', 400, "more than 524288 bytes"),
        ("/tokenize", ('{"prompt":"' + "\U0001f600" * (MAX_TEXT // 4 + 1) + '"}').encode(), 400, "more than 524288 bytes"),
        ("/detokenize", b'{"tokens":[' + b"5," * MAX_TEXT + b"5]}", 400, "at most 524288"),
        ("/v1/completions", b'{"prompt":"1","stop":"' + b"a" * 1025 + b'"}', 400, "more than 1024"),
        ("/v1/completions", b'{"prompt":[5],"n":4096,"max_tokens":240,"logprobs":20}', 400, "the answer could take"),
        ("/v1/completions", b'{"prompt":[5],"n":4096,"prompt_logprobs":20,"max_tokens":240}', 400, None),
    ],
)
def test_what_would_take_much_memory_is_refused(server, path, content, status, words):
    base, running_server = server
    if words is None:
        content = b'{"prompt":[' + b"5," * 100 + b'5],"n":4096,"prompt_logprobs":20}'
        words = "the answer could take"
    response = post(base, path, content)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert len(response.content) < 2 * MAX_MESSAGE
    wait_until(lambda: api(running_server).budget.taken == 0)


def test_prompts_have_a_longest_length_together(tiny_model, monkeypatch):
    monkeypatch.setattr(work, "MAX_TOKENS", 10)
    model = tiny_model("qwen3")
    assert work.completion_job(CompletionRequest(prompt=[[5] * 5, [5] * 5]), model).prompts
    with pytest.raises(ApiError, match="more than 10 tokens") as caught:
        work.completion_job(CompletionRequest(prompt=[[5] * 5, [5] * 6]), model)
    assert caught.value.status == 413


def test_what_an_answer_takes_is_estimated_high_enough(tiny_model):
    """Parts of it are alive at the same time: positions, the answer as objects, and as JSON."""
    model = tiny_model("qwen3")
    request = CompletionRequest(prompt=[[5, 6, 7, 8] * 50] * 4, max_tokens=1, prompt_logprobs=20, model="m")
    job = work.completion_job(request, model)
    scored = Worker(model, ServerMetrics(), max_queue=1, max_tokens=4096)
    task = Task(job.scoring, object())
    scored._run([task])
    tracemalloc.start()
    try:
        sampled = [[] for _ in job.prompts]
        answer = completion_answer(job, task.future.result(0), sampled, model=model, name="m", spelling=Spelling(model.tokenizer))
        to_json(answer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 800 * 21 * work.LOGPROB_BYTES < 2 * peak


def test_what_a_client_sent_is_repeated_in_part_only(server):
    base, _ = server
    for content in (b'{"model":"' + b"x" * 99_999 + b'"}', b'{"' + b"x" * 99_999 + b'":1,"prompt":"1"}'):
        response = post(base, "/v1/completions", content)
        assert response.status_code in (400, 404)
        assert len(response.content) < 3 * MAX_MESSAGE


def test_the_memory_of_all_requests_together_is_bounded_and_given_back():
    budget = Budget(100)
    with budget.share() as one, budget.share() as other:
        one.set(60)
        other.set(40)
        with pytest.raises(ApiError) as caught:
            other.set(41)
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        with pytest.raises(ApiError) as caught:
            one.set(101)
        assert caught.value.status == 413
        one.set(10)
        other.set(90)
    assert budget.taken == 0


def test_large_requests_that_come_together_are_told_to_wait(server):
    base, running_server = server
    budget = api(running_server).budget
    budget.taken += budget.limit
    try:
        refused(post(base, "/v1/score", b'{"groups": []}'), 429, words="too many large requests")
    finally:
        budget.taken -= budget.limit
    assert httpx2.get(base.replace("/v1", "/health")).status_code == 200


# --- connections


@contextlib.contextmanager
def raw(base):
    host, port = base.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connected:
        yield connected


def is_closed(connected):
    try:
        return connected.recv(1000) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("first", [b"", b"GET /health HT"])
def test_a_head_that_does_not_arrive_ends_the_connection(server, monkeypatch, first):
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    with raw(server[0]) as connected:
        connected.sendall(first)
        assert is_closed(connected)


def test_a_head_that_drips_ends_the_connection_also_after_an_answer(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with raw(server[0]) as connected:
        connected.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connected.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.4)
        connected.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # between requests more time may pass
        assert connected.recv(1000).startswith(b"HTTP/1.1 200")
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < start + 5:
                connected.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() < start + 3


def test_a_request_that_takes_longer_than_its_head_may_is_answered(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with raw(server[0]) as connected:
        head = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
        connected.sendall(head)
        time.sleep(0.4)
        connected.sendall(b"{}")
        assert connected.recv(1000).startswith(b"HTTP/1.1 400")


def test_the_longest_idle_connection_makes_room_for_a_new_one(server, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(server[0])) for _ in range(12)]
        assert httpx2.get(server[0].replace("/v1", "/health")).status_code == 200
        assert all(is_closed(one) for one in idle[:8])
        assert len(server[1].server_state.connections) <= 4


# --- reload


@pytest.fixture
def reloadable():
    model = make_model("qwen3")
    with serving(model, allow_reload=True) as base:
        before = scores(base)
        yield base
        after = scores(base)
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]


def refusal(base, folder):
    response = reload(base, folder)
    return refused(response, 400, param="kwargs")["message"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_file_is_not_opened(reloadable, tmp_path, name, kind):
    folder = weights_only(tmp_path / "new", dict(make_module("qwen3", seed=1).state_dict()))
    path = folder / name
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        assert f"{path} is not a regular file" in refusal(reloadable, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_change_nothing(reloadable, tmp_path, value):
    tensors = dict(make_module("qwen3", seed=1).state_dict())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][3] = value
    assert "model.norm.weight holds NaN or infinity" in refusal(reloadable, weights_only(tmp_path / "new", tensors))


def test_weights_that_only_overflow_here_and_integers_change_nothing(reloadable, tmp_path):
    tensors = dict(make_module("qwen3", seed=1).state_dict())
    wide = {**tensors, "model.norm.weight": torch.full((32,), 1e300, dtype=torch.float64)}
    assert "holds NaN or infinity in torch.float32" in refusal(reloadable, weights_only(tmp_path / "wide", wide))
    whole = {**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int64)}
    assert "torch.int64 in the folder" in refusal(reloadable, weights_only(tmp_path / "whole", whole))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_eight_bits_change_nothing(reloadable, tmp_path, dtype):
    tensors = dict(make_module("qwen3", seed=1).state_dict())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    assert f"{dtype} in the folder; hand over floats of 16" in refusal(reloadable, weights_only(tmp_path / "new", tensors))


def test_a_weight_in_two_files_changes_nothing(reloadable, tmp_path):
    tensors = dict(make_module("qwen3", seed=1).state_dict())
    folder = weights_only(tmp_path / "new", tensors)
    [first] = folder.iterdir()
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "other.safetensors")
    message = refusal(reloadable, folder)
    assert message == f"model.norm.weight is in two files, {first.name} and other.safetensors"


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", " " * 1_000_001])
def test_a_configuration_that_cannot_be_read_changes_nothing(reloadable, tmp_path, content):
    tensors = dict(make_module("qwen3", seed=1).state_dict())
    folder = weights_only(tmp_path / "new", {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(reloadable, folder) or "cannot be read" in refusal(reloadable, folder)


def test_a_path_that_is_empty_too_long_or_circular_is_refused(reloadable, tmp_path, monkeypatch):
    monkeypatch.chdir(weights_only(tmp_path / "here", dict(make_module("qwen3", seed=1).state_dict())))
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in ("", "x" * 300, "/" + "x/" * 5000, tmp_path / "a"):
        assert "a folder on the server's machine" in refusal(reloadable, path)
