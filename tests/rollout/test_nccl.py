"""The NCCL transport against a stand-in for vLLM's package: the calls it makes, in order. Real ones need GPUs."""

import asyncio
import sys
import types

import pytest
import torch

from topd.endpoint import replica
from topd.endpoint.faults import BadAnswer, Unavailable
from topd.errors import ConfigError
from topd.models.policy import Policy
from topd.rollout.nccl import NcclTransport, own_address


class Replica(replica.Replica):
    url = "http://127.0.0.1:8001"
    says: object = types.MappingProxyType({"world_size": 2})

    def __init__(self):
        """No connection is opened."""

    async def send(self, request):
        assert (request.method, request.path) == ("GET", "/get_world_size")
        return types.SimpleNamespace(json=lambda: self.says)


@pytest.fixture
def calls(monkeypatch):
    """What was asked of the stand-in; `calls.fail` makes the next transfer fail."""
    seen = types.SimpleNamespace(connected=[], sent=[], shut=0, fail=False)

    class Sender:
        source = None

        @classmethod
        def trainer_init(cls, info, *, client, source):
            seen.connected.append((info.world_size, info.rank, client))
            return cls()

        def send_weights(self):
            if seen.fail:
                raise RuntimeError("NCCL error")
            meta = [(m.name, m.dtype, m.shape) for m in self.source.metadata()]
            pairs = list(self.source)
            assert meta == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]
            seen.sent.append(dict(pairs))

        def shutdown(self):
            seen.shut += 1

    named = types.SimpleNamespace
    package = types.ModuleType("vllm.distributed.weight_transfer")
    package.base = named(WeightSource=object, ParamMeta=lambda name, dtype, shape: named(name=name, dtype=dtype, shape=shape))
    package.clients = named(HTTPVLLMWeightSyncClient=lambda url: url)
    package.nccl_engine = named(NCCLTrainerInitInfo=lambda **own: named(**own), NCCLTrainerWeightTransferEngine=Sender)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return seen


def test_every_server_gets_one_group_and_the_untied_weights_each_time(calls, tiny_model) -> None:
    transport, policy = NcclTransport(), tiny_model("qwen3")
    for version in (1, 2):
        transport.publish(Policy(policy), torch.float32)
        asyncio.run(transport.deliver(Replica(), version))
    assert calls.connected == [(3, 0, Replica.url)]
    assert len(calls.sent) == 2
    head = calls.sent[1]["lm_head.weight"]
    assert torch.equal(head, policy.module.get_input_embeddings().weight)
    transport.close()
    assert calls.shut == 1


def test_a_failed_transfer_is_a_fault_and_the_group_is_made_anew(calls, tiny_model) -> None:
    transport = NcclTransport()
    transport.publish(Policy(tiny_model("qwen3-untied")), torch.float32)
    calls.fail = True
    with pytest.raises(Unavailable, match="NCCL"):
        asyncio.run(transport.deliver(Replica(), 1))
    calls.fail = False
    asyncio.run(transport.deliver(Replica(), 1))
    assert len(calls.connected) == 2


@pytest.mark.parametrize("says", [{}, [], None, {"world_size": None}, {"world_size": float("inf")}])
def test_a_server_that_does_not_tell_how_many_it_is_is_a_fault(calls, says) -> None:
    replica = Replica()
    replica.says = says
    with pytest.raises(BadAnswer, match="gives no number of workers"):
        asyncio.run(NcclTransport().deliver(replica, 1))


def test_without_vllm_or_a_gpu_it_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r'rollout.vllm.weights = "files"'):
        NcclTransport()


def test_own_address_is_the_one_that_reaches_the_server() -> None:
    assert own_address("http://127.0.0.1:8001") == "127.0.0.1"
