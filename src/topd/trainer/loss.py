"""Stage 6 of 7. One micro-batch: forward, the algorithm's objective, and the package's only reduction.

Before: trainer/batch.py. After: trainer/step.py.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from topd.algorithms.base import Algorithm
from topd.models.language_model import LanguageModel
from topd.models.logprobs import completion_logprobs
from topd.types import TrainBatch


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """`loss` carries the gradient; the rest is detached and on the CPU."""

    loss: Float[Tensor, ""]
    log_ratio: Float[Tensor, " token"]
    clipped: Bool[Tensor, " token"]


def micro_loss(policy: LanguageModel, batch: TrainBatch, algorithm: Algorithm, config: Any, *, temperature: float) -> MicroLoss:
    """Weighted sum of the per-token losses of a micro-batch: its share of the mini-batch's loss, because weights sum to 1."""
    batch = batch.to(policy.device)
    logprobs = completion_logprobs(policy, batch.groups, temperature=temperature)
    token_loss, clipped = algorithm.objective(logprobs, batch, config)
    return MicroLoss(
        loss=(batch.weights * token_loss).sum(),
        log_ratio=(logprobs.detach() - batch.old_logprobs).cpu(),
        clipped=clipped.cpu(),
    )
