"""Stages 1 to 3: the left half of a run. Prompts become scored groups, at most `rollout.max_lag` steps ahead of training.

Before: tasks/prompts.py. After: algorithms/<type>.py. The rule for the importance ratio: docs/decisions/0024-feed.md.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from topd.assemble import Parts
from topd.collect.score import Sampler, kept, score
from topd.models.language_model import LanguageModel
from topd.rollout.engine import AheadEngine, SamplingParams
from topd.run import rollouts
from topd.run.directory import RunDirectory
from topd.run.progress import Display
from topd.tasks.prompts import demonstrate
from topd.types import Prompt, RolloutGroup, ScoredGroup


class Feed:
    """Scored groups, one step after the other. A step that is stored is read, and never sampled again."""

    def __init__(self, parts: Parts, directory: RunDirectory, display: Display) -> None:
        self.parts = parts
        self.config = parts.config
        self.directory = directory
        self.display = display
        self.lag = self.config.rollout.max_lag
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="topd-feed")
        self._ahead: dict[int, Future[list[RolloutGroup]]] = {}
        self._published = parts.engine.policy_version
        self._snapshot = parts.policy.snapshot() if self.lag == 1 else None
        self._snapshot_version = -1

    def take(self, step: int) -> list[ScoredGroup]:
        """The groups of a step. Raises RunStopped if too many of them cannot be scored."""
        prompts = self.parts.prompts.take(step)
        return self._stored(step, prompts) or self._score(self._sample(step, prompts))

    def run_ahead(self, step: int) -> None:
        """Begin with the rollouts of the steps that follow `step`, from the weights as they are now."""
        if not self.lag:
            return
        if self.lag == 1:
            self.settle()
            if self._snapshot is not None:
                self.parts.policy.copy_to(self._snapshot)
                self._snapshot_version = self.parts.policy.version
        elif self._published != self.parts.policy.version:
            assert isinstance(self.parts.engine, AheadEngine)
            self.parts.engine.publish(self.parts.policy.version)
            self._published = self.parts.policy.version
        for later in range(step + 1, min(step + self.lag, self.config.run.steps) + 1):
            if later not in self._ahead and not self.directory.rollouts(later).is_file():
                self._ahead[later] = self._executor.submit(self._generate, later, self.parts.prompts.take(later))

    def publish(self) -> None:
        """Let the next step's rollouts come from the weights as they are now, unless they are sampled ahead."""
        if not self.lag:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is sampled, then bring the engine to the policy's weights."""
        for future in self._ahead.values():
            future.exception()  # raised by `take`
        version = self.parts.policy.version
        if self.parts.engine.policy_version != version:
            self.parts.engine.load_weights(version)
        self._published = version

    def _stored(self, step: int, prompts: Sequence[Prompt]) -> list[ScoredGroup] | None:
        """The groups of a step that was stored before the run stopped."""
        path = self.directory.rollouts(step)
        if not path.is_file():
            return None
        if not self.directory.digests.knows(path):
            self.display.line(f"WARNING  {path} has no digest: not proven to be unchanged")
        return rollouts.read(path, prompts, self.directory.digests.difference(path))

    def _sample(self, step: int, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Completions from the policy, or the demonstrations for an algorithm that learns from those."""
        if not self.parts.method.samples:
            limit, version = self.config.rollout.max_completion_tokens, self.parts.policy.version
            shown = [demonstrate(prompt, self.parts.student, limit) for prompt in prompts]
            return [RolloutGroup(prompt=p, rollouts=(r,), policy_version=version) for p, r in zip(prompts, shown, strict=True)]
        with self.display.phase("rollout", f"step {step}") as on_tokens:
            ahead = self._ahead.pop(step, None)
            return ahead.result() if ahead is not None else self._generate(step, prompts, on_tokens)

    def _generate(
        self, step: int, prompts: Sequence[Prompt], on_tokens: Callable[[int], None] = lambda num_tokens: None
    ) -> list[RolloutGroup]:
        rollout = self.config.rollout
        params = SamplingParams(
            n=rollout.group_size,
            max_tokens=rollout.max_completion_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            seed=(self.config.run.seed, "rollout", step),
        )
        teacher = self.parts.teacher if self.parts.asks_teacher else None
        on_groups = teacher.prefetch if teacher is not None else lambda groups: None
        return self.parts.engine.generate(prompts, params, on_tokens=on_tokens, on_groups=on_groups)

    def _score(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        total = sum(len(completion) for group in groups for completion in group.completions)
        with self.display.phase("teacher", total=total) as on_tokens:
            scored = score(
                groups,
                grader=self.parts.grader,
                teacher=self.parts.teacher if self.parts.asks_teacher else None,
                wanted=self.parts.method.wanted,
                sampler=self._sampler() if self.parts.method.samples else None,
                on_tokens=on_tokens,
            )
        shares = {name: teacher.max_dropped_share for name, teacher in self.config.teachers_by_name().items()}
        return kept(groups, scored, max_dropped_share=shares, teacher_of=self.parts.teacher_of)

    def _sampler(self) -> Sampler:
        return Sampler(
            engine=self.parts.engine,
            policy=self.parts.student,
            weights_of=self._weights_of,
            temperature=self.config.rollout.temperature,
            max_tokens=self.config.trainer.max_tokens_per_microbatch,
            max_mismatch_kl=self.config.rollout.max_mismatch_kl,
        )

    def _weights_of(self, policy_version: int) -> LanguageModel | None:
        """Model with the weights of that version: the policy, or its copy. None if both have moved on."""
        if policy_version == self.parts.policy.version:
            return self.parts.student
        return self._snapshot if policy_version == self._snapshot_version else None
