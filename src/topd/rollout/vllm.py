"""Sampling through vLLM servers whose weights follow the trainer's, proven after every hand-over.

`topd serve --allow-reload` speaks the same routes, for machines without vLLM.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch

from topd.config import Config
from topd.endpoint.background import Background
from topd.endpoint.faults import BadAnswer, Fault, Forbidden, Unavailable
from topd.endpoint.replica import Replica
from topd.endpoint.served import ServedModel, make_canary
from topd.errors import RunStopped
from topd.models.language_model import LanguageModel
from topd.models.load import replica as copy_of
from topd.rollout.engine import SamplingParams
from topd.rollout.handover import Proof, Transport, hand_over
from topd.rollout.served import ServedEngine
from topd.types import Prompt, RolloutGroup


class VllmEngine(ServedEngine):
    """Connects at once; samples nothing before `load_weights` has proven that the servers have the policy's weights."""

    kind = "vllm"

    def __init__(self, config: Config, policy: LanguageModel, background: Background, *, transport: Transport) -> None:
        rollout = config.rollout
        assert rollout.base_url is not None
        canary = make_canary(policy.tokenizer)
        served = ServedModel(
            rollout.base_url,
            role="rollout",
            name=rollout.model,
            api_key_env=rollout.api_key_env,
            canary=canary,
            temperature=1.0,
            max_concurrent=rollout.max_concurrent_requests,
            timeout_s=rollout.timeout_s,
            max_attempts=rollout.max_attempts,
            patience_s=rollout.patience_s,
            verify=self._bring_up_to_date,
        )
        super().__init__(served, background, student=policy, eos_token_ids=policy.eos_token_ids)
        self.policy = policy
        self.transport = transport
        self.proof = Proof([canary], dtype=config.student.dtype)
        self.snapshot = copy_of(policy, policy.module.dtype) if rollout.max_lag else None
        self.snapshot_version = -1
        background.at_close(served.close)
        background.run(served.connect(wait_s=rollout.wait_s))

    def load_weights(self, policy_version: int) -> None:
        """Hand the policy's weights over to every server, and prove on each that it serves them.

        Raises RunStopped if a server serves other numbers; a server that cannot be reached is left alone until it can.
        """
        self.proof.renew(self.policy, policy_version)
        self.transport.publish(self.policy)
        self.policy_version = policy_version
        try:
            self.background.run(self._hand_over_all())
        except Forbidden as fault:
            raise RunStopped(self.served.forbidden(fault)) from fault
        except Fault as fault:
            raise RunStopped(
                f"rollout: the weights could not be handed over: {fault}. Servers must run with VLLM_SERVER_DEV_MODE=1 (or topd "
                "serve --allow-reload) and read the weights folder under the same path (rollout.weights_directory)."
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
        groups = super().generate(prompts, params, on_tokens=on_tokens, on_groups=on_groups)
        try:
            self.background.run(self._prove_all())
        except Fault as fault:
            raise RunStopped(
                f"rollout: {fault}. Look at the servers, then run the same command with --run.resume true."
            ) from fault
        return groups

    def behaviour(self, policy_version: int) -> LanguageModel | None:
        """The trainer's own numbers: those of the policy, or of its copy if the rollouts are one step older."""
        if self.snapshot is not None and policy_version == self.snapshot_version:
            return self.snapshot
        assert policy_version == self.policy_version, "the weights that sampled are gone"
        return self.policy

    def keep_weights(self) -> None:
        if self.snapshot is None:
            return
        with torch.no_grad():
            for mine, theirs in zip(self.snapshot.module.parameters(), self.policy.module.parameters(), strict=True):
                mine.copy_(theirs)
        self.snapshot_version = self.policy_version

    async def _hand_over_all(self) -> None:
        trusted = [replica for replica in self.served.pool.replicas if replica.trusted]
        if not trusted:
            raise Unavailable("; ".join(replica.reason for replica in self.served.pool.replicas))
        found = await asyncio.gather(*(self._hand_over(replica) for replica in trusted), return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Fault):
                raise outcome
        faults = [(r, f) for r, f in zip(trusted, found, strict=True) if isinstance(f, Fault)]
        if len(faults) == len(trusted):
            raise faults[0][1]
        for replica, fault in faults:
            self.served.pool.distrust(replica, fault)

    async def _hand_over(self, replica: Replica) -> None:
        await hand_over(replica, self.transport, self.policy_version)
        await self._prove(replica)

    async def _prove(self, replica: Replica) -> None:
        found = await self.served.ask_canary(replica)
        self.proof.check(replica.url, found, self.policy_version)

    async def _prove_all(self) -> None:
        await asyncio.gather(*(self._prove(replica) for replica in self.served.pool.replicas if replica.trusted))

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """For a server that was away: it gets the weights anew before it samples again."""
        try:
            await self._hand_over(replica)
        except RunStopped as error:
            raise BadAnswer(str(error)) from None
