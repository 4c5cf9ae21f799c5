"""Per-token rewards from the teacher's and the behaviour policy's log-probs of the sampled token."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LogRatio = Float[Tensor, " token"]

NEAR = 0.5
"""Below this |log-ratio| the form that is exact at 0 is used; both forms are accurate around it."""

ROUNDING = 1e-4
"""Nats. Sampling and scoring one model in float32 differed by up to 4e-5."""

ROUNDING_BFLOAT16 = 0.1
"""Nats, root mean square over a group. One model in bfloat16 and in float32, or twice in bfloat16, differed by up to 0.025 (175
thousand weights) and 0.071 (135 million): benchmarks/rounding.py."""


def proximal_reward(log_ratio: LogRatio, *, alpha: float) -> LogRatio:
    """Log-ratio of the proximal teacher, a mix of teacher and student, to the student.

        reward = log(alpha * exp(log_ratio) + 1 - alpha),   log_ratio = teacher_logprob - behaviour_logprob

    Nats per token. Never below log(1 - alpha), also at log_ratio = -inf; not bounded above. `alpha = 1` is the plain log-ratio.
    Computed by logaddexp, which neither overflows nor loses the floor; near 0 as log1p(alpha * expm1(log_ratio)), which is
    exactly 0 where teacher and student agree, so that normalisation has no rounding to blow up. Differentiable in `log_ratio`.
    Raises ValueError unless 0 < alpha <= 1.
    Source: TOP-D, arXiv 2607.04751, the reward of its proximal teacher.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if alpha == 1:
        return log_ratio
    floor = math.log1p(-alpha)
    mixed = torch.logaddexp(log_ratio + math.log(alpha), torch.full_like(log_ratio, floor))
    near_zero = torch.log1p(alpha * torch.expm1(log_ratio.clamp(-NEAR, NEAR)))
    return torch.where(log_ratio.abs() < NEAR, near_zero, mixed).clamp_min(floor)


def without_rounding(log_ratio: LogRatio) -> LogRatio:
    """The log-ratio, with 0 where it is within ROUNDING nats of 0: there teacher and student agree.

    One model that samples a token and then scores it differs from itself by float32 rounding. In a group without other
    differences, normalisation would turn that noise into advantages of unit size.
    """
    return log_ratio.masked_fill(log_ratio.abs() < ROUNDING, 0.0)


def in_agreement(log_ratio: LogRatio, counts: Int[Tensor, " group"], *, rounding: float) -> Bool[Tensor, " token"]:
    """True for every token of a group in which teacher and student differ by no more than rounding.

        sqrt(mean(log_ratio^2)) <= rounding      over all tokens of the group

    `counts` are tokens per group, in order; `rounding` is in nats. A log-ratio of -inf is never agreement. A floor under the
    standard deviation would not help: AdamW divides by the size of past gradients, so small noise moves weights as far as large.
    """
    group = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=log_ratio.device)
    mean_square = zeros.index_add(0, group, log_ratio.double().square()) / counts
    return (mean_square <= rounding**2)[group]


def clipped_reward(log_ratio: LogRatio, *, low: float, high: float) -> LogRatio:
    """The log-ratio, clamped to [low, high] nats. Gradient is zero where it is clamped. Practice of several frameworks."""
    return log_ratio.clamp(low, high)


def power_reward(log_ratio: LogRatio, behaviour_logprobs: LogRatio, *, exponent: float) -> LogRatio:
    """Difference of powers of the two probabilities, bounded in [-1, 1] for a positive exponent.

        reward = T^a - S^a,   S = exp(behaviour_logprobs), T = S * exp(log_ratio)

    Unit-free. Source: PowerOPD, arXiv 2606.17199 (its possible division by `a` is left out; group normalisation cancels it).
    """
    teacher_logprobs = behaviour_logprobs + log_ratio
    return torch.exp(exponent * teacher_logprobs) - torch.exp(exponent * behaviour_logprobs)


def floor_reward(log_ratio: LogRatio, *, floor: float) -> LogRatio:
    """The log-ratio, never below `floor` nats. Source: REOPOLD, arXiv 2603.11137."""
    return log_ratio.clamp_min(floor)
