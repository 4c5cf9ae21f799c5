"""New weights for a running server, and the proof that it serves them.

A real server was seen to serve neither the old nor the new weights after a reload, and to say nothing: so an untied copy is
written, prefix caches are dropped, and a fixed probe is scored there and compared with the trainer after every hand-over.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from topd.endpoint.background import LAST_WORDS
from topd.endpoint.faults import Unavailable
from topd.endpoint.replica import Replica, Request
from topd.errors import RunStopped
from topd.models.export import export_untied
from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens
from topd.models.policy import Policy
from topd.models.proof import distance, probe_logprobs
from topd.run.files import remove

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}
"""Nats, mean difference over the probe, by `student.dtype`, the precision that the servers compute in."""

STALE, ROUNDING = 0.25, 1e-5
"""Numbers that are this share nearer to an earlier version's are that version's, unless all that differs is rounding (nats)."""

RESUME_S = 10.0
CACHE_TRIES, CACHE_PAUSE_S = 20, 0.5


@runtime_checkable
class Transport(Protocol):
    """Transport of weights to a server."""

    def publish(self, policy: Policy, dtype: torch.dtype) -> None:
        """Make the policy's weights ready in the servers' precision, beside those that `deliver` gives."""

    def commit(self) -> None:
        """Let `deliver` give what was published last."""

    async def deliver(self, replica: Replica, policy_version: int) -> None:
        """Make a paused server take what was committed."""


class FilesTransport:
    """A safetensors folder that the servers can read, reloaded by vLLM's dev-mode route."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._next = folder.with_name(f"{folder.name}.next")
        self._parent_is_ours = not folder.parent.exists()

    def publish(self, policy: Policy, dtype: torch.dtype = torch.float32) -> None:
        export_untied(policy, self._next, dtype)

    def commit(self) -> None:
        remove(self.folder)
        self._next.rename(self.folder)

    async def deliver(self, replica: Replica, policy_version: int) -> None:
        kwargs = {"weights_path": str(self.folder.resolve())}
        await replica.send(Request(path="/collective_rpc", json={"method": "reload_weights", "kwargs": kwargs}))

    def close(self) -> None:
        """Remove the folder, and the one it was made in if that was not there before and nothing else is in it."""
        remove(self.folder)
        remove(self._next)
        if self._parent_is_ours:
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()


class Proof:
    """The trainer's log-probs of fixed tokens, for this version and all before."""

    def __init__(self, groups: Sequence[Tokens], *, dtype: str) -> None:
        self.groups = list(groups)
        self.tolerance = TOLERANCE[dtype]
        self.expected = torch.empty(0)
        self.earlier: dict[int, Tensor] = {}
        """By version; a few numbers each."""

    def numbers(self, policy: LanguageModel) -> Tensor:
        """Log-probs of the fixed tokens under the policy as it is now."""
        return probe_logprobs(policy, self.groups)

    def renew(self, policy_version: int, numbers: Tensor) -> None:
        """Expect these numbers of that version from now on."""
        self.expected = self.earlier[policy_version] = numbers

    def check(self, url: str, served: Tensor, policy_version: int) -> None:
        """Raise RunStopped, with what to look at, unless the server's numbers are the trainer's."""
        off = distance(served, self.expected)
        distances = {version: distance(served, numbers) for version, numbers in self.earlier.items()}
        nearest = min(distances, key=lambda version: distances[version], default=policy_version)
        stale = off > ROUNDING and distances.get(nearest, off) < min(self.tolerance, STALE * off)
        if off <= self.tolerance and not stale:
            return
        cause = (
            f"They are those of version {nearest}: the reload did nothing, the server was restarted since, or a `topd probe` "
            "gave it weights. Look whether the server can read the weights folder under the same path, and at its log."
            if stale
            else "They belong to no version of this run. Look, in this order: does another run or probe use this server; is the "
            "output head reloaded (some servers miss a "
            "tied head; topd writes it untied); is the served model the student's architecture; does it run in the precision of "
            "student.dtype, unquantised; is its --max-model-len within the length at which a rotary scaling changes; is a prefix "
            "cache, an adapter or a logits processor in between; was it restarted."
        )
        raise RunStopped(
            f"{url} does not serve the weights of version {policy_version}: its log-probs of fixed tokens are off by {off:.3g} "
            f"nats on average (at most {self.tolerance:g} allowed). {cause} Nothing that it sampled is used. "
            "Then run the same command with --run.resume true."
        )


async def hand_over(replica: Replica, transport: Transport, policy_version: int) -> None:
    """Pause, deliver, drop what was cached under the old weights, resume. Raises a Fault.

    Whatever happens, the server is told to resume: a paused one would answer nothing to anybody.
    """
    try:
        await replica.send(Request(path="/pause?mode=keep", json={}))
        await transport.deliver(replica, policy_version)
        await drop_cached(replica)
    finally:
        await resume(replica)


async def resume(replica: Replica) -> None:
    """Also when this is being cancelled."""
    telling = asyncio.create_task(replica.send(Request(path="/resume", json={}), timeout_s=RESUME_S), name=LAST_WORDS)
    await asyncio.shield(telling)


async def drop_cached(replica: Replica) -> None:
    """Keys and values computed under the old weights. vLLM says with status 200 that it could not."""
    for _ in range(CACHE_TRIES):
        response = await replica.send(Request(path="/reset_prefix_cache", json={}))
        if b'"success":false' not in response.content.replace(b" ", b""):
            return
        await asyncio.sleep(CACHE_PAUSE_S)
    raise Unavailable(f"{replica.url} keeps what it cached under the old weights (/reset_prefix_cache does not succeed)")
