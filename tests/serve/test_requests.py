"""What is refused, with which status, parameter and words; and the small routes."""

import json
import logging
import socket

import httpx2
import pytest

from tests.serve.serving import serving, wait_until
from topd import __version__

PROMPT = [5, 9, 3]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def client(model):
    with serving(model, name="small", max_body_mb=0.1) as base, httpx2.Client(base_url=base, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def root(client):
    with httpx2.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=30) as root:
        yield root


def refused(response, status, *, param=None, words=""):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert words in error["message"]
    return error


# --- small routes


def test_models(client, model):
    [card] = client.get("/models").json()["data"]
    own = card.pop("topd")
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "small",
        "object": "model",
        "owned_by": "topd",
        "root": model.name,
        "parent": None,
        "max_model_len": 256,
    }
    assert len(own.pop("fingerprint")) == 64
    assert own == {"version": __version__, "vocab_size": 40, "eos_token_ids": [1], "dtype": "float32"}


def test_tokenize_and_back(root, model):
    answer = root.post("/tokenize", json={"prompt": "1+2=", "model": "small"}).json()
    assert answer == {"count": 4, "max_model_len": 256, "tokens": model.tokenizer.encode("1+2="), "token_strs": None}
    assert root.post("/tokenize", json={"prompt": "1", "return_token_strs": True}).json()["token_strs"] == ["1"]
    assert root.post("/detokenize", json={"tokens": [*answer["tokens"], 1]}).json() == {"prompt": "1+2=<eos>"}
    assert root.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    refused(root.post("/detokenize", json={"tokens": [40]}), 400, param="tokens", words="40")
    refused(root.post("/tokenize", json={"messages": []}), 400, param="prompt")


def test_health_and_metrics(root, client):
    assert root.get("/health").status_code == 200
    client.post("/completions", json={"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0})
    client.post("/completions", json={"prompt": PROMPT, "max_tokens": 2, "seed": 3})
    root.get("/some/unknown/path")
    page = root.get("/metrics").text
    for line in (
        'topd_serve_requests_total{route="/v1/completions",status="200"}',
        'topd_serve_requests_total{route="other",status="404"}',
        "topd_serve_scored_tokens_total ",
        "topd_serve_generated_tokens_total ",
        "topd_serve_queued_requests 0.0",
        'topd_serve_request_seconds_count{route="/v1/completions"}',
        'topd_serve_batch_size_count{work="scoring"}',
    ):
        assert line in page
    assert "/some/unknown" not in page


def test_two_servers_in_one_process_count_for_themselves(model):
    with serving(model) as one, serving(model) as other:
        httpx2.post(f"{one}/completions", json={"prompt": PROMPT, "max_tokens": 2})
        assert "/v1/completions" not in httpx2.get(other.replace("/v1", "/metrics")).text


# --- keys


@pytest.mark.parametrize(
    ("route", "content", "key"),
    [
        ("/v1/score", '{"groups":[{"prompt":[5],"completions":[[6]]}],"groups":[{"prompt":[5],"completions":[[7]]}]}', "groups"),
        ("/v1/score", '{"groups":[{"prompt":[5],"prompt":[6],"completions":[[6]]}]}', "prompt"),
        ("/v1/score", '{"temperature":2,"groups":[{"prompt":[5],"completions":[[6]]}],"temperature":2}', "temperature"),
        ("/v1/completions", '{"prompt":[5],"user":{"a":1,"a":null}}', "a"),
        ("/tokenize", '{"prompt":"1","model":null,"model":"small"}', "model"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(root, route, content, key):
    refused(root.post(route, content=content, headers=JSON), 400, words=f"the key {key} is given twice")


# --- routes and names


def test_unknown_routes_and_methods(client, root):
    assert refused(client.get("/nothing"), 404)["type"] == "NotFoundError"
    refused(root.get("/v1/models/"), 404)
    response = client.get("/completions")
    refused(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("route", ["/pause", "/resume", "/reset_prefix_cache", "/collective_rpc"])
def test_reload_routes_do_not_exist_unless_allowed(root, route):
    refused(root.post(route, json={}), 404)


@pytest.mark.parametrize(
    ("route", "request_"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/score", {"groups": [{"prompt": PROMPT, "completions": [[2]]}]}),
        ("/tokenize", {"prompt": "1"}),
        ("/detokenize", {"tokens": [2]}),
    ],
)
def test_another_model(root, route, request_):
    refused(root.post(route, json={**request_, "model": "other"}), 404, param="model", words="other")
    refused(root.post(route, content=json.dumps({**request_, "model": "\ud800"}), headers=JSON), 404, param="model")
    assert root.post(route, json={**request_, "model": None}).status_code == 200


# --- values


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        ({}, "prompt", "must be given"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "at least one token"),
        ({"prompt": [""]}, "prompt", "at least one token"),
        ({"prompt": [[2], "1"]}, "prompt", "string"),
        ({"prompt": [2, [3]]}, "prompt", "token ids"),
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"prompt": 3}, "prompt", "string"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [1.5]}, "prompt", "string"),
        ({"prompt": [40]}, "prompt", "token id 40 is outside the vocabulary of 40"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [10**30]}, "prompt", "outside"),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": PROMPT, "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"prompt": PROMPT, "max_tokens": "4"}, "max_tokens", "integer"),
        ({"prompt": PROMPT, "max_tokens": 254}, "prompt", "256"),
        ({"prompt": [2] * 257, "max_tokens": 0, "echo": True}, "prompt", "256"),
        ({"prompt": PROMPT, "n": 0}, "n", "greater"),
        ({"prompt": PROMPT, "n": 2, "temperature": 0}, "n", "must be 1"),
        ({"prompt": [PROMPT] * 100, "n": 100}, None, "split"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature", "greater"),
        ({"prompt": PROMPT, "temperature": 2.5}, "temperature", "less"),
        ({"prompt": PROMPT, "temperature": 1e-5}, "temperature", "0 (greedy)"),
        ({"prompt": PROMPT, "top_p": 0}, "top_p", "greater"),
        ({"prompt": PROMPT, "logprobs": 21}, "logprobs", "20"),
        ({"prompt": PROMPT, "logprobs": True}, "logprobs", "integer"),
        ({"prompt": PROMPT, "prompt_logprobs": -1}, "prompt_logprobs", "greater"),
        ({"prompt": PROMPT, "stop": [""]}, "stop", "empty"),
        ({"prompt": PROMPT, "stop": 3}, "stop", "string"),
        ({"prompt": PROMPT, "echo": "yes"}, "echo", "boolean"),
        ({"prompt": PROMPT, "stream": True}, "stream", "not supported"),
        ({"prompt": PROMPT, "suffix": "x"}, "suffix", "not supported"),
        ({"prompt": PROMPT, "logit_bias": {"3": 1}}, "logit_bias", "not supported"),
        ({"prompt": PROMPT, "best_of": 2}, "best_of", "not supported"),
        ({"prompt": PROMPT, "presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"prompt": PROMPT, "min_p": 0.1}, "min_p", "not supported"),
        ({"prompt": PROMPT, "top_k": 5}, "top_k", "not supported"),
        ({"prompt": PROMPT, "ignore_eos": True}, "ignore_eos", "not supported"),
        ({"prompt": PROMPT, "something_new": 1}, "something_new", "not supported"),
    ],
)
def test_completions_that_are_refused(client, request_, param, words):
    refused(client.post("/completions", json=request_), 400, param=param, words=words)


def test_parameters_that_change_nothing_are_accepted(client):
    neutral = {
        "user": "somebody",
        "stream": False,
        "suffix": None,
        "best_of": 2,
        "n": 2,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "min_p": 0.0,
        "top_k": -1,
        "max_tokens": None,
        "temperature": None,
        "unknown": None,
    }
    assert client.post("/completions", json={"prompt": PROMPT, **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        ({}, "groups", "required"),
        ({"groups": []}, "groups", "at least 1"),
        ({"groups": [{"prompt": PROMPT, "completions": []}]}, "groups", "at least 1"),
        ({"groups": [{"prompt": [], "completions": [[2]]}]}, "groups[0].prompt", "at least one token"),
        ({"groups": [{"prompt": PROMPT, "completions": [[2], []]}]}, "groups[0].completions[1]", "at least one token"),
        ({"groups": [{"prompt": "1+2", "completions": [[2]]}]}, "groups[0].prompt", "token ids"),
        ({"groups": [{"prompt": PROMPT, "completions": [[40]]}]}, "groups[0].completions[0]", "vocabulary"),
        ({"groups": [{"prompt": PROMPT, "completions": [[2] * 254]}]}, "groups[0]", "256"),
        ({"groups": [{"prompt": PROMPT, "completions": [[2]], "weights": 1}]}, "groups", "not permitted"),
        ({"groups": [{"prompt": PROMPT, "completions": [[2]]}], "temperature": 0}, "temperature", "greater"),
        ({"groups": [{"prompt": PROMPT, "completions": [[2]]}], "top_k": -1}, "top_k", "not supported"),
    ],
)
def test_scores_that_are_refused(client, request_, param, words):
    refused(client.post("/score", json=request_), 400, param=param, words=words)


# --- bodies


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "JSON"),
        (b"{", None, "JSON"),
        (b"[1]", None, "object, found list"),
        (b'{"prompt": [2], "temperature": NaN}', None, "NaN is not a JSON number"),
        (b'{"prompt": [2], "temperature": Infinity}', None, "Infinity"),
        (b'{"prompt": [2], "temperature": 1e999}', "temperature", "finite"),
        (b"\xff\xfe{}", None, "JSON"),
        (b'{"prompt": "\\ud800"}', "prompt", "Unicode"),
        (b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", None, "too deeply"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", None, "JSON"),
    ],
)
def test_bodies_that_are_no_request(client, body, param, words):
    refused(client.post("/completions", content=body, headers=JSON), 400, param=param, words=words)


def test_too_large_a_body_is_refused_while_it_arrives(client, root):
    large = b'{"prompt": [2' + b" " * 200_000 + b"]}"
    refused(client.post("/completions", content=large, headers=JSON), 413, words="0.1 MB")

    def endless():
        for _ in range(1000):
            yield b" " * 1000

    refused(client.post("/completions", content=endless(), headers=JSON), 413)  # no Content-Length to go by
    assert client.post("/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert root.get("/health").status_code == 200


def test_a_body_is_not_waited_for_once_it_is_declared_too_large(client):
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address, timeout=10) as raw:
        raw.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_fault_of_the_server_is_500_without_its_details(model, monkeypatch, caplog):
    with serving(model) as base:

        def fail(*args, **kwargs):
            raise RuntimeError("secret detail")

        monkeypatch.setattr("topd.serve.worker.score_groups", fail)
        with caplog.at_level(logging.ERROR):
            response = httpx2.post(f"{base}/score", json={"groups": [{"prompt": PROMPT, "completions": [[2]]}]})
            refused(response, 500, words="its log says why")
            assert "secret" not in response.text
            wait_until(lambda: "secret detail" in caplog.text)  # it is logged after the answer
        monkeypatch.undo()
        assert httpx2.post(f"{base}/score", json={"groups": [{"prompt": PROMPT, "completions": [[2]]}]}).status_code == 200
        assert 'status="500"' in httpx2.get(base.replace("/v1", "/metrics")).text


def test_only_json_is_read(client):
    """A foreign web page can make a browser send other types unasked."""
    refused(client.post("/completions", content=b'{"prompt": [2]}', headers={"Content-Type": "text/plain"}), 400, words="Type")
    assert client.post("/completions", content=b'{"prompt": [2]}', headers={"Content-Type": "Application/JSON; charset=utf-8"})
