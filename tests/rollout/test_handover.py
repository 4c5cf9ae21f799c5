"""New weights for a running server: in which order, and what proves that it serves them."""

import asyncio
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.fakes import make_model
from tests.serve.serving import serving, wait_until
from topd.endpoint.background import Background
from topd.endpoint.faults import Fault, Refused, Unavailable
from topd.endpoint.replica import Replica
from topd.errors import RunStopped
from topd.models.logprobs import Tokens, score_groups
from topd.models.policy import Policy
from topd.rollout import handover
from topd.rollout.handover import ROUNDING, TOLERANCE, FilesTransport, Proof, hand_over
from topd.rollout.vllm import VllmEngine

CANARY = Tokens((5, 9), ((3, 7, 30, 12, 8, 21), (6, 6)))


def numbers(model):
    return torch.cat(score_groups(model, [CANARY], max_tokens=4096)[0])


def moved(seed, *, by):
    """The same model after an update of that size."""
    model, direction = make_model(seed=0), make_model(seed=seed)
    with torch.no_grad():
        for mine, theirs in zip(model.module.parameters(), direction.module.parameters(), strict=True):
            mine.add_(by * theirs)
    return model


@pytest.fixture
def proof():
    """Of version 7, which is far from version 4 and a very small update away from version 5."""
    proof = Proof([CANARY], dtype="float32")
    for version, model in ((4, make_model(seed=9)), (5, moved(1, by=1e-4)), (7, moved(1, by=1.1e-4))):
        proof.renew(version, proof.numbers(model))
    return proof


def said(proof, served):
    with pytest.raises(RunStopped) as caught:
        proof.check("http://a", served, 7)
    return str(caught.value)


def test_the_trainers_own_numbers_pass_and_so_does_rounding(proof):
    expected = numbers(moved(1, by=1.1e-4))
    torch.testing.assert_close(proof.expected, expected)
    proof.check("http://a", expected, 7)
    proof.check("http://a", expected + 0.9 * ROUNDING * torch.tensor([1, -1] * 4), 7)


@pytest.mark.parametrize("version", [4, 5])
def test_numbers_of_an_earlier_version_are_recognised_however_small_the_difference(proof, version):
    """The update from version 5 moved the numbers by far less than two engines may differ."""
    served = proof.earlier[version]
    off = float((served - proof.expected).abs().mean())
    assert (off < TOLERANCE["float32"]) == (version == 5)
    message = said(proof, served + 1e-7)
    assert message.startswith("http://a does not serve the weights of version 7: its log-probs of fixed tokens are off by")
    assert (
        f"They are those of version {version}: the reload did nothing, the server was restarted since, or a `topd probe`"
        in message
    )
    assert "read the weights folder under the same path" in message


def test_numbers_of_no_version_say_where_to_look(proof):
    message = said(proof, numbers(make_model(seed=3)))
    assert "They belong to no version of this run." in message
    for word in ("output head", "tied", "architecture", "precision", "prefix cache", "adapter", "restarted"):
        assert word in message
    assert "Nothing that it sampled is used." in message


@pytest.mark.parametrize("served", [torch.zeros(3), torch.full((8,), float("nan"))])
def test_numbers_that_cannot_be_compared_are_refused(proof, served):
    assert "no version of this run" in said(proof, served)


def test_weights_that_did_not_change_are_not_called_old():
    proof = Proof([CANARY], dtype="float32")
    for version in (0, 2):
        proof.renew(version, proof.numbers(make_model(seed=0)))
    proof.check("http://a", numbers(make_model(seed=0)) + 5e-4, 2)


def test_low_precision_may_differ_by_its_noise(proof):
    coarse = Proof([CANARY], dtype="bfloat16")
    for version, model in ((5, moved(1, by=1e-4)), (7, moved(1, by=1.1e-4))):
        coarse.renew(version, coarse.numbers(model))
    noise = 0.05 * torch.tensor([1.0, -1.0] * 4)
    coarse.check("http://a", coarse.expected + noise, 7)
    assert "no version" in said(proof, proof.expected + noise)


# the hand-over itself


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_what_is_handed_over_has_an_output_head_of_its_own(tmp_path, kind):
    transport = FilesTransport(tmp_path / "handover")
    model = make_model(kind, seed=4)
    transport.publish(Policy(model))
    transport.commit()
    weights = load_file(tmp_path / "handover/model.safetensors")
    head = model.module.get_output_embeddings().weight
    assert torch.equal(weights["lm_head.weight"], head)
    assert json.loads((tmp_path / "handover/config.json").read_text())["tie_word_embeddings"] is False


def handing_over(url, transport, version=1):
    async def once():
        replica = Replica(url, api_key=None, timeout_s=2.0)
        try:
            await hand_over(replica, transport, version)
        finally:
            await replica.close()

    asyncio.run(once())


@pytest.fixture
def server(tmp_path):
    """(proxy, transport) of a server that may be given new weights."""
    model = make_model("qwen3", seed=0)
    with serving(model, allow_reload=True) as base, proxying(base) as proxy:
        transport = FilesTransport(tmp_path / "handover")
        transport.publish(Policy(make_model("qwen3", seed=4)))
        transport.commit()
        yield proxy, transport


def paths(proxy):
    return [request.path for request in proxy.requests if request.kind == "control"]


def served_numbers(url):
    import httpx2
    from safetensors.torch import load

    groups = [{"prompt": CANARY.prompt_ids, "completions": CANARY.completions}]
    return load(httpx2.post(f"{url}/score", json={"groups": groups}).content)["logprobs"]


def test_a_server_is_paused_given_weights_rid_of_its_cache_and_resumed(server):
    proxy, transport = server
    handing_over(proxy.url, transport)
    assert paths(proxy) == ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    asked = next(request.json for request in proxy.requests if request.path == "/collective_rpc")
    assert asked == {"method": "reload_weights", "kwargs": {"weights_path": str(transport.folder.resolve())}}
    torch.testing.assert_close(served_numbers(proxy.url), numbers(make_model("qwen3", seed=4)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_server_is_resumed_whatever_fails_in_between(server, failing):
    proxy, transport = server
    proxy.give(lambda number: faults.status(400) if number == failing else None, "control")
    with pytest.raises(Refused):
        handing_over(proxy.url, transport)
    assert paths(proxy)[-1] == "/resume"


def keeping(count):
    """A server that cannot drop its cache that many times, and says so with status 200, as vLLM does."""
    left = [count]

    async def fault(exchange):
        if exchange.request.path == "/reset_prefix_cache" and left[0] > 0:
            left[0] -= 1
            return faults.Reply(200, b'{"success": false}')
        return await exchange.forward()

    return faults.always(fault)


def test_a_cache_of_the_old_weights_is_dropped_for_certain(server, monkeypatch):
    monkeypatch.setattr(handover, "CACHE_PAUSE_S", 0.01)
    proxy, transport = server
    proxy.give(keeping(3), "control")
    handing_over(proxy.url, transport)
    assert paths(proxy) == ["/pause?mode=keep", "/collective_rpc", *["/reset_prefix_cache"] * 4, "/resume"]
    proxy.give(keeping(999), "control")
    with pytest.raises(Unavailable, match="keeps what it cached under the old weights"):
        handing_over(proxy.url, transport)
    assert paths(proxy)[-1] == "/resume"


def test_a_hand_over_that_is_cut_short_still_wakes_the_server(server):
    """By Ctrl-C, say: a paused server would answer nothing to anybody."""
    proxy, transport = server
    proxy.give(lambda number: faults.stall if number == 1 else None, "control")
    background = Background()

    async def once():
        replica = Replica(proxy.url, api_key=None, timeout_s=30.0)
        background.at_close(replica.close)
        await hand_over(replica, transport, 1)

    future = background.submit(once())
    wait_until(lambda: paths(proxy)[-1:] == ["/collective_rpc"])
    background.close()
    assert future.cancelled()
    assert paths(proxy) == ["/pause?mode=keep", "/collective_rpc", "/resume"]
    assert len(served_numbers(proxy.url)) == 8


def test_a_server_without_the_routes_is_a_fault(server, tmp_path):
    with serving(make_model()) as base, pytest.raises(Fault, match="404"):
        handing_over(base, server[1])


def test_a_folder_of_the_users_keeps_what_is_in_it(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/thesis.tex").touch()
    for parent, left in (("shared", ["thesis.tex"]), ("new", None)):
        transport = FilesTransport(tmp_path / parent / "handover")
        transport.publish(Policy(make_model()))
        transport.commit()
        assert (tmp_path / parent / "handover/model.safetensors").is_file()
        transport.close()
        found = [path.name for path in (tmp_path / parent).iterdir()] if (tmp_path / parent).exists() else None
        assert found == left


def test_weights_are_published_in_the_servers_precision(tmp_path):
    transport = FilesTransport(tmp_path / "handover")
    transport.publish(Policy(make_model()), torch.bfloat16)
    transport.commit()
    assert {tensor.dtype for tensor in load_file(tmp_path / "handover/model.safetensors").values()} == {torch.bfloat16}


def test_a_proof_is_made_without_the_trainers_own_rounding():
    proof = Proof([CANARY], dtype="bfloat16")
    proof.renew(1, proof.numbers(dataclasses.replace(make_model(), autocast_dtype=torch.bfloat16)))
    torch.testing.assert_close(proof.expected, numbers(make_model()), atol=1e-5, rtol=0)


def test_a_policys_copy_scores_as_the_policy_did():
    """In the trainer's precision, after the policy has changed."""
    policy = dataclasses.replace(make_model(), autocast_dtype=torch.bfloat16)
    before, copied = numbers(policy), Policy(policy).snapshot()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    assert torch.equal(numbers(copied), before)


def test_rounding_is_not_an_earlier_version(proof):
    """An update so small that the server's numbers are nearer to those before it."""
    proof.expected = proof.earlier[7] = proof.earlier[5] + 0.5 * ROUNDING
    proof.check("http://a", proof.earlier[5], 7)


def test_weights_that_change_during_a_hand_over_are_handed_over_too(monkeypatch):
    engine, given = object.__new__(VllmEngine), []
    engine.policy_version, engine.transport = 3, None

    async def giving(replica, transport, version):
        given.append(version)
        engine.policy_version = 4

    async def prove(replica):
        given.append("proven")

    async def once():
        replica = Replica("http://127.0.0.1:9", api_key=None, timeout_s=1.0)
        await engine._hand_over(replica)
        await replica.close()

    monkeypatch.setattr("topd.rollout.vllm.hand_over", giving)
    engine._prove = prove
    asyncio.run(once())
    assert given == [3, 4, "proven"]
