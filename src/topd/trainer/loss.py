"""Stage 6 of 7. One micro-batch: forward, the algorithm's objective, and the package's only reduction.

Before: trainer/batch.py. After: trainer/step.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from topd.algorithms.base import Method
from topd.models.logprobs import TokenGroup
from topd.models.policy import Policy
from topd.ragged import Ragged


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """`loss` carries the gradient; the rest is detached and on the CPU."""

    loss: Float[Tensor, ""]
    log_importance: Float[Tensor, " token"]
    clipped: Bool[Tensor, " token"]


def micro_loss(policy: Policy, groups: Sequence[TokenGroup], streams: Ragged, method: Method, *, temperature: float) -> MicroLoss:
    """Weighted sum of the per-token losses of a micro-batch: its share of the mini-batch's loss, because weights sum to 1."""
    streams = streams.to(policy.model.device)
    forward = policy(groups, temperature=temperature)
    token_loss, clipped = method.objective(forward, streams)
    return MicroLoss(
        loss=(streams["weights"] * token_loss).sum(),
        log_importance=(forward.logprobs.detach() - streams["old_logprobs"]).cpu(),
        clipped=clipped.cpu(),
    )
