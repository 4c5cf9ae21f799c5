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
from topd.errors import RunStopped
from topd.models.language_model import LanguageModel
from topd.models.logprobs import by_length, microbatches
from topd.run.interrupt import uninterrupted
from topd.trainer.loss import micro_loss
from topd.trainer.optimizer import learning_rate, make_optimizer
from topd.types import TrainBatch, UpdateReport


class Trainer:
    """The policy's weights, their optimizer, and the number of updates made. It never learns the algorithm's name."""

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
        if config.gradient_checkpointing:
            checkpoint_layers(policy)

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer update on one mini-batch. Raises RunStopped, with the weights untouched, if anything is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, num_clipped, log_ratios = 0.0, 0, []
        for groups in microbatches(by_length(batch.groups), self.config.max_tokens_per_microbatch):
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
            num_clipped += part.num_clipped
            log_ratios.append(part.log_ratio)
        grad_norm = self._clip_gradients(batch)
        rate = learning_rate(self.config, update=self.policy_version, total_updates=self.total_updates)
        with uninterrupted():
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.policy_version += 1
        log_ratio = torch.cat(log_ratios)
        return UpdateReport(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=len(log_ratio),
            num_clipped=num_clipped,
            log_ratio=log_ratio,
        )

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
            'the step\'s rollouts; lower trainer.learning_rate, or use a bounded reward (algorithm.type = "topd").'
        )


def checkpoint_layers(policy: LanguageModel) -> None:
    """Recompute every decoder layer in the backward pass.

    Not transformers' own switch, which drops the prompt's keys and values and only warns.
    """
    layers: Any = policy.decoder.layers
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
