"""Stage 7 of 7. Mini-batches -> new weights and a report: accumulate over micro-batches, clip, step.

Before: trainer/loss.py. After: the engine takes over the weights (rollout/engine.py), and the next step begins.
"""

import math
from collections.abc import Callable, Sequence

import torch

from topd.algorithms.base import Method
from topd.config import TrainerConfig
from topd.errors import RunStopped
from topd.models.logprobs import microbatches, rows_of
from topd.models.policy import Policy
from topd.run.interrupt import uninterrupted
from topd.trainer.loss import micro_loss
from topd.trainer.schedule import learning_rate
from topd.types import RolloutGroup, TrainBatch, UpdateReport


class Trainer:
    """Updates of the policy by a method, whose name it never learns.

    `reports` are those of the updates since `begin_step`. An interrupt never separates them from the weights and their version.
    """

    def __init__(
        self,
        policy: Policy,
        method: Method,
        config: TrainerConfig,
        *,
        temperature: float,
        total_updates: int,
    ) -> None:
        self.policy = policy
        self.method = method
        self.config = config
        self.temperature = temperature
        self.total_updates = total_updates
        self.reports: tuple[UpdateReport, ...] = ()

    def begin_step(self) -> None:
        """Forget the reports of the step before."""
        self.reports = ()

    def update_all(self, batches: Sequence[TrainBatch], on_tokens: Callable[[int], None] = lambda num_tokens: None) -> None:
        """The updates of a step that are not made yet. `on_tokens` is called with the tokens of every update."""
        done = len(self.reports)
        on_tokens(sum(batch.streams.num_tokens for batch in batches[:done]))
        for batch in batches[done:]:
            on_tokens(self.update(batch).num_tokens)

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer update on one mini-batch. Raises RunStopped, with the weights untouched, if anything is not finite."""
        self.policy.zero_grad(set_to_none=True)
        loss = 0.0
        log_importance, clipped = torch.empty(batch.streams.num_tokens), torch.empty(batch.streams.num_tokens, dtype=torch.bool)
        for pieces in microbatches(batch.groups, self.config.max_tokens_per_microbatch):
            groups, streams = rows_of(batch.groups, pieces), batch.streams.cut(pieces)
            part = micro_loss(self.policy, groups, streams, self.method, temperature=self.temperature)
            if not torch.isfinite(part.loss):
                raise RunStopped(self._not_finite("the loss", [batch.groups[piece.group] for piece in pieces]))
            part.loss.backward()
            loss += float(part.loss.detach())
            places = batch.streams.places(pieces)
            log_importance[places], clipped[places] = part.log_importance, part.clipped
        grad_norm = self.policy.clip_gradients(self.config.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RunStopped(self._not_finite("the gradient", batch.groups))
        rate = learning_rate(self.config, update=self.policy.version, total_updates=self.total_updates)
        report = UpdateReport(loss=loss, grad_norm=grad_norm, learning_rate=rate, log_importance=log_importance, clipped=clipped)
        with uninterrupted():
            self.policy.step(rate)
            self.reports = (*self.reports, report)
        return report

    def _not_finite(self, what: str, groups: Sequence[RolloutGroup]) -> str:
        shown = ", ".join(group.prompt.id for group in groups[:4]) + (" ..." if len(groups) > 4 else "")
        return (
            f"{what} of update {self.policy.version + 1} is not finite (prompts {shown}). The weights were not changed. Look at "
            'the step\'s rollouts; in a new run lower trainer.learning_rate, or use a bounded reward (algorithm.type = "topd").'
        )
