"""Weights from GPU to GPU by vLLM's own weight-transfer engine, driven from the trainer. Needs vLLM 0.32 in this environment.

Servers start with --weight-transfer-config '{"backend": "nccl"}' and VLLM_SERVER_DEV_MODE=1.
"""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import torch
from torch import Tensor

from topd.endpoint.faults import BadAnswer, Unavailable
from topd.endpoint.replica import Replica, Request
from topd.errors import ConfigError, first_line
from topd.models.policy import Policy


class NcclTransport:
    """One NCCL group per server: the trainer is rank 0, the server's workers follow."""

    def __init__(self) -> None:
        try:
            from vllm.distributed.weight_transfer import base, clients, nccl_engine
        except ImportError as error:
            raise ConfigError(
                f'rollout.vllm.weights = "nccl" needs vLLM (0.32 or newer) in this environment ({error}). Install it, or set '
                'rollout.vllm.weights = "files".'
            ) from error
        if not torch.cuda.is_available():
            raise ConfigError('rollout.vllm.weights = "nccl" needs a CUDA device here. Set rollout.vllm.weights = "files".')
        self._base, self._clients, self._nccl = base, clients, nccl_engine
        self._senders: dict[str, Any] = {}
        self._weights: dict[str, Tensor] = {}

    def publish(self, policy: Policy, dtype: torch.dtype = torch.float32) -> None:
        self._weights = dict(policy.weights(dtype))

    def commit(self) -> None:
        """No-op: with this transport nothing is published while other weights are served."""

    async def deliver(self, replica: Replica, policy_version: int) -> None:
        if replica.url not in self._senders:
            response = await replica.send(Request(path="/get_world_size", method="GET"))
            try:
                world_size = 1 + int(response.json()["world_size"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise BadAnswer(f"{replica.url}/get_world_size gives no number of workers: {first_line(error)}") from None
            self._senders[replica.url] = await asyncio.to_thread(self._connect, replica.url, world_size)
        sender = self._senders[replica.url]
        sender.source = self._source()
        try:
            await asyncio.to_thread(sender.send_weights)
        except (RuntimeError, OSError) as error:  # the group is unusable after a failure
            self._senders.pop(replica.url)
            raise Unavailable(f"{replica.url}: NCCL transfer failed: {error}") from None

    def _connect(self, url: str, world_size: int) -> Any:
        info = self._nccl.NCCLTrainerInitInfo(
            master_address=own_address(url), master_port=free_port(), world_size=world_size, rank=0
        )
        client = self._clients.HTTPVLLMWeightSyncClient(url)
        return self._nccl.NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source())

    def _source(self) -> Any:
        weights, meta = self._weights, self._base.ParamMeta

        class Source(self._base.WeightSource):
            def metadata(self) -> list[Any]:
                return [meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(weights.items())

        return Source()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.shutdown()
        self._senders = {}


def own_address(url: str) -> str:
    """The address of this machine from which that server is reached."""
    parts = httpx2.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((parts.host, parts.port or 80))
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
