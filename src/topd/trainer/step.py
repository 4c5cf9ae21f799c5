"""Stage 7 of 7. Mini-batches -> new weights and a report: accumulate over micro-batches, clip, step.

Before: trainer/loss.py. After: the engine takes over the weights (rollout/engine.py), and the next step begins.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topd.algorithms.base import Algorithm
from topd.config import TrainerConfig
from topd.errors import ConfigError, RunStopped
from topd.models.language_model import LanguageModel
from topd.models.logprobs import microbatches
from topd.run.interrupt import uninterrupted
from topd.trainer.loss import micro_loss
from topd.trainer.optimizer import learning_rate, make_optimizer
from topd.types import TrainBatch, UpdateReport


class Trainer:
    """The policy's weights, their optimizer, and the updates made. It never learns the algorithm's name.

    `policy_version` counts all updates; `reports` are those since `begin_step`. An interrupt never separates the two from the
    weights.
    """

    def __init__(
        self,
        policy: LanguageModel,
        algorithm: Algorithm,
        algorithm_config: Any,
        config: TrainerConfig,
        *,
        temperature: float,
        total_updates: int,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.algorithm_config = algorithm_config
        self.config = config
        self.temperature = temperature
        self.total_updates = total_updates
        self.optimizer = make_optimizer(policy, config)
        self.policy_version = 0
        self.reports: tuple[UpdateReport, ...] = ()
        if config.gradient_checkpointing:
            checkpoint_layers(policy)

    def begin_step(self) -> None:
        """Forget the reports of the step before."""
        self.reports = ()

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer update on one mini-batch. Raises RunStopped, with the weights untouched, if anything is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for groups in microbatches(batch.groups, self.config.max_tokens_per_microbatch):
            part = micro_loss(
                self.policy,
                TrainBatch(groups=tuple(groups)),
                self.algorithm,
                self.algorithm_config,
                temperature=self.temperature,
            )
            if not torch.isfinite(part.loss):
                raise RunStopped(self._not_finite("the loss", [group.prompt_id for group in groups]))
            part.loss.backward()
            loss += float(part.loss.detach())
            sizes = [len(group.weights) for group in groups]
            for piece, ratios, clips in zip(groups, part.log_ratio.split(sizes), part.clipped.split(sizes), strict=True):
                seen.setdefault(piece.prompt_id, []).append((ratios, clips))
        grad_norm = self._clip_gradients(batch)
        rate = learning_rate(self.config, update=self.policy_version, total_updates=self.total_updates)
        in_order = [streams for trained in batch.groups for streams in seen[trained.prompt_id]]
        report = UpdateReport(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            log_ratio=torch.cat([ratios for ratios, _ in in_order]),
            clipped=torch.cat([clips for _, clips in in_order]),
        )
        with uninterrupted():
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.policy_version += 1
            self.reports = (*self.reports, report)
        return report

    def trainable(self) -> dict[str, Tensor]:
        """The weights that training changes, by name."""
        return {name: p for name, p in self.policy.module.named_parameters() if p.requires_grad}

    def _clip_gradients(self, batch: TrainBatch) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.trainable().values(), self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise RunStopped(self._not_finite("the gradient", [group.prompt_id for group in batch.groups]))
        return float(norm)

    def _not_finite(self, what: str, prompt_ids: list[str]) -> str:
        shown = ", ".join(prompt_ids[:4]) + (" ..." if len(prompt_ids) > 4 else "")
        return (
            f"{what} of update {self.policy_version + 1} is not finite (prompts {shown}). The weights were not changed. Look at "
            'the step\'s rollouts; in a new run lower trainer.learning_rate, or use a bounded reward (algorithm.type = "topd").'
        )


def checkpoint_layers(policy: LanguageModel) -> None:
    """Recompute every decoder layer in the backward pass.

    Not transformers' own switch, which drops the prompt's keys and values and only warns.
    """
    layers: Any = getattr(policy.decoder, "layers", None)
    if layers is None:
        kind = type(policy.module).__name__
        raise ConfigError(f"trainer.gradient_checkpointing = true does not know the layers of {kind}. Set it to false.")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
