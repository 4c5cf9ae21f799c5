"""Sampling through vLLM servers whose weights follow the trainer's, proven after every hand-over.

`topd serve --allow-reload` speaks the same routes, for machines without vLLM.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from topd.config import Config as RunConfig
from topd.config import Dtype, EndpointConfig, EngineConfig, EnvironmentName
from topd.endpoint.background import Background
from topd.endpoint.faults import BadAnswer, Fault, Forbidden, Refused
from topd.endpoint.replica import Replica
from topd.endpoint.served import ServedModel
from topd.errors import ConfigError, RunStopped
from topd.models.policy import Policy
from topd.models.proof import make_canary
from topd.rollout.engine import Resources, SamplingParams
from topd.rollout.handover import FilesTransport, Proof, Transport, hand_over, resume
from topd.rollout.nccl import NcclTransport
from topd.rollout.served import ServedEngine
from topd.types import Prompt, RolloutGroup

TOLERANCE = {"float32": 0.02, "bfloat16": 0.3}
"""Nats by which sampled log-probs may differ from the trainer's, on average over a group, by `student.dtype`."""


class Config(EndpointConfig, EngineConfig):
    NAME_KEY = "model"
    OWN_NUMBERS = True
    MAY_CHANGE = EndpointConfig.MAY_CHANGE | {"weights", "weights_directory"}
    api_key_env: EnvironmentName = Field("TOPD_ROLLOUT_API_KEY", description="Environment variable that holds the servers' key.")
    weights: Literal["files", "nccl"] = Field(
        "files", description="Transport of new weights: a safetensors folder that servers can read, or vLLM's NCCL transfer."
    )
    weights_directory: str | None = Field(
        None,
        description="Folder with the same path here and on the servers, for handover/ with new weights. Unset: the run folder.",
    )
    model: str | None = Field(None, description="Name under which the servers serve the student. Unset: the only one they list.")

    def rules(self, config: RunConfig) -> Iterator[str]:
        for key, teacher in config.served_teachers().items():
            if shared := teacher.roots & self.roots:
                yield (
                    f"{key}.base_url and rollout.vllm.base_url share {', '.join(sorted(shared))}, whose weights are replaced by "
                    "the student's after every step. Use another server."
                )
        if self.weights == "nccl" and config.rollout.max_lag > 1:
            yield (
                'rollout.max_lag must be 0 or 1 with rollout.vllm.weights = "nccl", which keeps no copy of weights that are not '
                f'yet served; found {config.rollout.max_lag}. Lower it, or set rollout.vllm.weights = "files".'
            )
        if self.weights == "nccl" and self.weights_directory is not None:
            yield 'rollout.vllm.weights_directory would be ignored: rollout.vllm.weights = "nccl" writes no files. Remove it.'


def make(section: Config, *, config: RunConfig, policy: Policy, resources: Resources) -> "VllmEngine":
    transport = make_transport(section, Path(config.run.directory).expanduser())
    resources.opened.enter_context(closing(transport))
    return VllmEngine(section, policy, resources.background, transport=transport, dtype=config.student.dtype)


def make_transport(section: Config, run: Path) -> FilesTransport | NcclTransport:
    """Transport of weights to servers. Raises ConfigError if a package it needs is not installed. `run`: the run folder."""
    if section.weights == "nccl":
        return NcclTransport()
    own = f"topd-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"  # runs may share that folder
    shared = section.weights_directory
    return FilesTransport(Path(shared).expanduser() / own if shared else run / "handover")


class VllmEngine(ServedEngine):
    """Connects at once; samples nothing before `load_weights` has proven that the servers have the policy's weights."""

    kind = "vllm"
    strict_ends = True
    way_out = ""

    def __init__(
        self, section: Config, policy: Policy, background: Background, *, transport: Transport, dtype: Dtype = "float32"
    ) -> None:
        canary = make_canary(policy.model.tokenizer)
        served = ServedModel(
            section,
            role="rollout.vllm",
            name=section.model,
            canary=canary,
            one_model=False,
            verify=self._bring_up_to_date,
        )
        super().__init__(served, background, student=policy.model, eos_token_ids=policy.model.eos_token_ids)
        self.policy = policy
        self.transport = transport
        self.dtype = getattr(torch, dtype)
        self.tolerance = TOLERANCE[dtype]
        self.proof = Proof([canary], dtype=dtype)
        self._weights = threading.Lock()
        self._published: tuple[int, Tensor] | None = None
        """Version and probe of weights that are ready and not served yet."""
        background.at_close(served.close)
        background.run(self._resume_all())
        background.run(served.connect())
        if policy.model.untied and served.card.fingerprint is None:
            raise ConfigError(
                "student.lora.target_modules and modules_to_save must leave the embedding and the output head alone where the "
                "model ties them and vLLM samples: a server that was started from the tied model takes one tensor for both. Take "
                "embed_tokens and lm_head out, set student.name to an untied copy (with tie_word_embeddings = false and its own "
                'lm_head.weight) and start the servers from it, or set rollout.engine = "embedded".'
            )

    def load_weights(self, policy_version: int) -> None:
        """Hand the policy's weights over to every server, and prove on each that it serves them.

        An unreachable server is skipped and gets them when it returns; without a reachable one the call waits. Raises
        RunStopped if a server serves other numbers, or none comes back.
        """
        self.publish(policy_version)
        self._take_over()

    def publish(self, policy_version: int) -> None:
        """Make the policy's weights ready beside those that are served; `generate` hands them over before it samples."""
        with self._weights:
            self.transport.publish(self.policy, self.dtype)
            self._published = policy_version, self.proof.numbers(self.policy.model)

    def _take_over(self) -> None:
        with self._weights:
            if self._published is None:
                return
            (self.policy_version, numbers), self._published = self._published, None
            self.transport.commit()
            self.proof.renew(self.policy_version, numbers)
            try:
                self.background.run(self._hand_over_all())
            except Forbidden as fault:
                raise RunStopped(self.served.forbidden(fault)) from fault
            except Fault as fault:
                raise RunStopped(
                    f"rollout: the weights could not be handed over: {fault}. Servers must be up, run with "
                    "VLLM_SERVER_DEV_MODE=1 (or topd serve --allow-reload) and read the weights folder under the same path "
                    "(rollout.vllm.weights_directory). Start them, then run the same command with --run.resume true."
                ) from fault

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_groups: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    ) -> list[RolloutGroup]:
        """As `ServedEngine`; afterwards every server must still serve the same weights, or nothing of it is used."""
        self._take_over()
        groups = super().generate(prompts, params, on_tokens=on_tokens, on_groups=on_groups)
        self.background.run(self._prove_all())
        return groups

    def describe(self) -> str:
        """The servers, for the probe."""
        replicas = self.served.pool.replicas
        lost = "".join(f"; {replica.fault}" for replica in replicas if not replica.trusted)
        return f"{sum(r.trusted for r in replicas)} of {len(replicas)} serve the trainer's weights, proven{lost}"

    async def _resume_all(self) -> None:
        """A run that was killed in a hand-over has left them paused."""
        await asyncio.gather(*(resume(replica) for replica in self.served.pool.replicas), return_exceptions=True)

    async def _hand_over_all(self) -> None:
        pool = self.served.pool
        trusted = [replica for replica in pool.replicas if replica.trusted]
        outcomes = await asyncio.gather(*(self._hand_over(replica) for replica in trusted), return_exceptions=True)
        hopeless = trusted and all(isinstance(outcome, Refused) for outcome in outcomes)
        for replica, outcome in zip(trusted, outcomes, strict=True):
            if isinstance(outcome, Fault) and not (hopeless or isinstance(outcome, Forbidden)):
                pool.distrust(replica, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        await pool.wait_for_one()

    async def _hand_over(self, replica: Replica) -> None:
        """Until it serves the newest version, which may change meanwhile."""
        version = -1
        while version != self.policy_version:
            version = self.policy_version
            await hand_over(replica, self.transport, version)
        await self._prove(replica)

    async def _prove(self, replica: Replica) -> None:
        self.proof.check(replica.url, await self.served.ask_canary(replica), self.policy_version)

    async def _prove_all(self) -> None:
        """Prove all reachable servers. Groups of the others are compared one by one (collect/score.py)."""
        trusted = [replica for replica in self.served.pool.replicas if replica.trusted]
        outcomes = await asyncio.gather(*(self._prove(replica) for replica in trusted), return_exceptions=True)
        for replica, outcome in zip(trusted, outcomes, strict=True):
            if isinstance(outcome, Fault):
                self.served.pool.distrust(replica, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Give a returning server the weights again before it samples."""
        try:
            await self._hand_over(replica)
        except RunStopped as error:
            raise BadAnswer(str(error)) from None
