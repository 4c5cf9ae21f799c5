"""The record of a step: stored rollouts and updates, and its metrics."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from topd.assemble import Parts
from topd.ragged import Ragged
from topd.run import rollouts
from topd.run.directory import RunDirectory
from topd.run.metrics import step_metrics
from topd.run.progress import Display
from topd.types import Credit, ScoredGroup, StepReport, TrainBatch


class Record:
    """Writes what a step made to the run folder. `num_tokens`: sampled before this step."""

    def __init__(self, parts: Parts, directory: RunDirectory, display: Display) -> None:
        self.parts = parts
        self.directory = directory
        self.display = display
        self.num_tokens = 0

    def rollouts(self, step: int, groups: Sequence[ScoredGroup], evidence: Ragged, credit: Credit) -> None:
        """Store the step before its first update, unless it is stored."""
        path = self.directory.rollouts(step)
        if not path.is_file():
            rollouts.write(path, groups, evidence, credit, self.directory.digests.note)

    def updating(self, batches: Sequence[TrainBatch]) -> AbstractContextManager[Callable[[int], None]]:
        """The phase of the updates, for the display and the clock."""
        total = sum(batch.streams.num_tokens for batch in batches)
        return self.display.phase("update", f"{len(batches)} updates", total=total)

    def updates(self, step: int, batches: Sequence[TrainBatch], reports: StepReport) -> None:
        """Store what the updates saw."""
        before, note = self.parts.policy.version - len(batches), self.directory.digests.note
        rollouts.write_updates(self.directory.updates(step), batches, reports, policy_version=before, note=note)

    def metrics(
        self, step: int, groups: Sequence[ScoredGroup], evidence: Ragged, credit: Credit, reports: StepReport
    ) -> dict[str, Any]:
        """The step's row of metrics.jsonl."""
        parts = self.parts
        return step_metrics(
            step=step,
            policy_version=parts.policy.version,
            groups=groups,
            flat=evidence,
            credit=credit,
            reports=reports,
            seconds=self.display.seconds(),
            tokens_before=self.num_tokens,
            sampled=parts.method.samples,
            prompts=parts.prompts.take(step),
            counts=parts.teacher.counts() if parts.teacher is not None else None,
            teacher_of=parts.teacher_of,
        )
