"""Per-token losses, unreduced, lower is better. The only reduction is the weighted sum in trainer/loss.py."""

import torch
from jaxtyping import Float
from torch import Tensor

PerToken = Float[Tensor, " token"]


def clipped_surrogate(log_importance: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float) -> PerToken:
    """PPO's clipped objective per token, negated.

        loss_t = -min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t),   r_t = exp(log_ratio_t)

    `log_importance` is the log-prob of the policy being updated minus that of the policy that sampled. Gradient flows through
    `log_importance` only, and not where the clipped branch is the smaller one.
    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7.
    """
    ratio = torch.exp(log_importance)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, clipped * advantages)


def negative_log_likelihood(logprobs: PerToken) -> PerToken:
    """Cross-entropy on the given tokens, in nats: loss_t = -logprob_t."""
    return -logprobs


def is_clipped(log_importance: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float) -> Tensor:
    """True where `clipped_surrogate` has no gradient: the ratio has already moved past the bound in the wanted direction."""
    ratio = torch.exp(log_importance)
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
