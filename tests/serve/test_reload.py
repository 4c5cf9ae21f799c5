"""New weights in a running server: exactly the new model's numbers, or the old ones and an error."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file

from tests.fakes import make_model, make_module, plain_logprobs, ragged_groups, save_folder
from tests.serve.serving import serving, wait_until
from tests.serve.test_clients import num_queued
from topd.serve.weights import fingerprint

JSON = {"Content-Type": "application/json"}
GROUPS = ragged_groups((4, (5, 2)), (1, (3,)))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(params=["qwen3", "qwen3-untied"])
def served(request):
    """(base URL, model that is served, its kind)"""
    model = make_model(request.param)
    with serving(model, allow_reload=True) as base:
        yield base, model, request.param


@pytest.fixture
def tied():
    """(base URL, model) of a model whose output head is its embedding."""
    model = make_model("qwen3")
    with serving(model, allow_reload=True) as base:
        yield base, model


def reload(base, folder):
    request = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return httpx2.post(base.replace("/v1", "/collective_rpc"), json=request)


def scores(base):
    groups = [dict(prompt=g.prompt_ids, completions=g.completions) for g in GROUPS]
    response = httpx2.post(f"{base}/score", json={"groups": groups})
    return load_tensors(response.content)["logprobs"], response.headers["x-topd-fingerprint"]


def oracle(module):
    return torch.cat([plain_logprobs(module, g.prompt_ids, c) for g in GROUPS for c in g.completions]).detach()


def assert_serves(base, module):
    found, mark = scores(base)
    torch.testing.assert_close(found, oracle(module), atol=1e-5, rtol=1e-5)
    rows = [(*g.prompt_ids, *g.completions[0]) for g in GROUPS]
    request = {"prompt": rows, "max_tokens": 0, "echo": True, "logprobs": 0}
    for row, choice in zip(rows, httpx2.post(f"{base}/completions", json=request).json()["choices"], strict=True):
        expected = plain_logprobs(module, row[:1], row[1:]).detach()
        logprobs = torch.tensor(choice["logprobs"]["token_logprobs"][1:])
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert httpx2.get(f"{base}/models").json()["data"][0]["topd"]["fingerprint"] == mark


def weights_only(folder, tensors):
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_model_folder(served, tmp_path):
    base, _, kind = served
    before = scores(base)
    folder = save_folder(tmp_path / "new", kind, seed=1)
    response = reload(base, folder)
    assert (response.status_code, response.json()) == (200, {"results": [None]})
    assert_serves(base, make_module(kind, seed=1))
    after = scores(base)
    assert after[1] != before[1]
    assert after[1] == fingerprint(make_model(kind, seed=1))
    reload(base, save_folder(tmp_path / "old", kind, seed=0))
    assert scores(base)[1] == before[1]


def test_weights_in_several_files_without_a_configuration(served, tmp_path):
    base, _, kind = served
    make_module(kind, seed=1).save_pretrained(tmp_path / "new", max_shard_size="8KB")
    (tmp_path / "new" / "config.json").unlink()
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    assert reload(base, tmp_path / "new").status_code == 200
    assert_serves(base, make_module(kind, seed=1))


def test_completions_are_sampled_from_the_new_weights(tied, tmp_path):
    base, _ = tied
    reload(base, save_folder(tmp_path / "new", seed=1))
    request = {"prompt": [5, 6], "max_tokens": 12, "seed": 3, "logprobs": 0, "return_token_ids": True}
    found = httpx2.post(f"{base}/completions", json=request).json()["choices"][0]
    with serving(make_model("qwen3", seed=1)) as fresh:
        expected = httpx2.post(f"{fresh}/completions", json=request).json()["choices"][0]
    assert found == expected
    logprobs = plain_logprobs(make_module(seed=1), (5, 6), tuple(found["token_ids"])).detach()
    torch.testing.assert_close(torch.tensor(found["logprobs"]["token_logprobs"]), logprobs, atol=1e-5, rtol=1e-5)


def test_an_untied_copy_of_a_tied_model_leaves_it_tied(tied, tmp_path):
    base, model = tied
    new = make_module("qwen3", seed=1)
    folder = weights_only(tmp_path / "new", dict(new.state_dict()))
    assert HEAD in load_file(folder / "model.safetensors")
    assert reload(base, folder).status_code == 200
    assert_serves(base, new)
    assert model.module.get_output_embeddings().weight is model.module.get_input_embeddings().weight
    assert scores(base)[1] == fingerprint(make_model("qwen3", seed=1))


def test_another_output_head_unties_a_tied_model_and_a_tied_one_ties_it_again(tied, tmp_path):
    base, model = tied
    new = make_module("qwen3-untied", seed=1)
    assert reload(base, save_folder(tmp_path / "untied", "qwen3-untied", seed=1)).status_code == 200
    assert_serves(base, new)
    assert scores(base)[1] == fingerprint(make_model("qwen3-untied", seed=1))
    assert reload(base, save_folder(tmp_path / "untied2", "qwen3-untied", seed=2)).status_code == 200
    assert_serves(base, make_module("qwen3-untied", seed=2))
    assert reload(base, save_folder(tmp_path / "tied", "qwen3", seed=2)).status_code == 200
    assert_serves(base, make_module("qwen3", seed=2))
    assert model.module.get_output_embeddings().weight is model.module.get_input_embeddings().weight


def test_weights_of_another_precision_are_converted(tied, tmp_path):
    base, model = tied
    new = make_module("qwen3", seed=1)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in new.state_dict().items()}
    assert reload(base, weights_only(tmp_path / "new", rounded)).status_code == 200
    assert model.module.dtype == torch.float32
    new.load_state_dict(rounded)
    assert_serves(base, new)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.norm.weight"), "lacks 1 weights: model.norm.weight"),
        (without(HEAD), "lacks 1 weights: lm_head.weight"),
        (without(EMBEDDING), "lacks"),
        (lambda tensors: {**tensors, "model.extra": torch.zeros(2)}, "has besides 1 weights: model.extra"),
        (lambda tensors: {**tensors, "model.norm.weight": torch.ones(5)}, "(5,) in the folder, (32,) here"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(tmp_path, change, words):
    model = make_model("qwen3-untied")
    with serving(model, allow_reload=True) as base:
        before = scores(base)
        folder = weights_only(tmp_path / "new", change(dict(make_module("qwen3-untied", seed=1).state_dict())))
        response = reload(base, folder)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        after = scores(base)
        assert torch.equal(after[0], before[0])
        assert after[1] == before[1]


def test_folders_that_cannot_be_read_change_nothing(tied, tmp_path):
    base, _ = tied
    before = scores(base)
    cut = save_folder(tmp_path / "cut", seed=1)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    garbled = shutil.copytree(save_folder(tmp_path / "whole", seed=1), tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    for folder in (cut, tmp_path / "empty", tmp_path / "nowhere", garbled):
        response = reload(base, folder)
        assert response.status_code == 400, folder
        assert response.json()["error"]["param"] == "kwargs"
        after = scores(base)
        assert torch.equal(after[0], before[0])
        assert after[1] == before[1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"method": "shutdown"},
        {"method": "reload_weights"},
        {"method": "reload_weights", "kwargs": {"weights_path": 3}},
        {"method": "reload_weights", "kwargs": {"weights_path": "\x00"}},
        {"method": "reload_weights", "kwargs": ["weights_path"]},
        {"method": "reload_weights", "kwargs": {"weights_path": "/", "extra": 1}},
    ],
)
def test_other_calls_are_refused(tied, body):
    base, _ = tied
    assert httpx2.post(base.replace("/v1", "/collective_rpc"), content=json.dumps(body), headers=JSON).status_code == 400


def test_what_waits_while_paused_is_answered_with_the_new_weights(tied, tmp_path):
    base, _ = tied
    root = base.removesuffix("/v1")
    before = scores(base)
    assert httpx2.post(f"{root}/pause", params={"mode": "keep"}, json={}).json() == {"status": "paused"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scores, base)
        wait_until(lambda: num_queued(base) == 1)
        assert reload(base, save_folder(tmp_path / "new", seed=1)).status_code == 200
        assert httpx2.post(f"{root}/reset_prefix_cache", json={}).json() == {"success": True}
        assert not waiting.done()
        assert httpx2.post(f"{root}/resume", json={}).json() == {"status": "resumed"}
        after = waiting.result()
    torch.testing.assert_close(after[0], oracle(make_module(seed=1)), atol=1e-5, rtol=1e-5)
    assert after[1] != before[1]
    assert httpx2.post(f"{root}/pause?mode=sometimes").status_code == 400


def test_a_request_that_spans_a_reload_is_refused(tied, tmp_path, monkeypatch):
    """Two pieces of one request, the weights changed in between: no answer mixes two models."""
    from topd.serve.work import Reload
    from topd.serve.worker import Worker

    base, _ = tied
    folder = save_folder(tmp_path / "new", seed=1)
    sample = Worker._sample

    def then_reload(worker, batch):
        found = sample(worker, batch)
        worker.queue.submit([Reload(folder=folder)])
        return found

    monkeypatch.setattr(Worker, "_sample", then_reload)
    response = httpx2.post(f"{base}/completions", json={"prompt": [5], "n": 33, "max_tokens": 2})
    assert response.status_code == 503
    assert "weights changed" in response.json()["error"]["message"]
