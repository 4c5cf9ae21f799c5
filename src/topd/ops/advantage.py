"""Normalisation: from returns to advantages. Statistics are float64, results keep the dtype of the input."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Counts = Int[Tensor, " segment"]


def normalize_over_tokens(returns: Float[Tensor, " token"], counts: Counts, *, std_floor: float) -> Float[Tensor, " token"]:
    """Standardise returns within segments of tokens; one token, one vote, so long completions weigh more.

        advantage = (return - mean) / max(std, std_floor)      over all tokens of the segment, unbiased std

    `counts` are tokens per segment, in order: the groups for TOP-D, one segment for a whole batch. A segment of one token
    or of equal returns gives zeros. Source: TOP-D, arXiv 2607.04751, its advantage; unbiased std and floor as in prime-rl.
    """
    mean, std = segment_mean_std(returns, counts)
    centred = returns.to(torch.float64) - torch.repeat_interleave(mean, counts)
    return (centred / torch.repeat_interleave(std.clamp_min(std_floor), counts)).to(returns.dtype)


def normalize_over_rollouts(
    rewards: Float[Tensor, " rollout"], group_sizes: Counts, *, std_floor: float
) -> Float[Tensor, " rollout"]:
    """Standardise one reward per completion within its group. Source: GRPO, arXiv 2402.03300, outcome supervision."""
    return normalize_over_tokens(rewards, group_sizes, std_floor=std_floor)


def segment_mean_std(
    values: Float[Tensor, " token"], counts: Counts
) -> tuple[Float[Tensor, " segment"], Float[Tensor, " segment"]]:
    """Mean and unbiased std of each segment, in float64; 0 for a single value. Two passes: a common offset cancels no spread."""
    segment = torch.repeat_interleave(torch.arange(len(counts), device=values.device), counts)
    values = values.to(torch.float64)
    size = counts.to(torch.float64)
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=values.device)
    mean = zeros.index_add(0, segment, values) / size.clamp_min(1)
    squared = (values - mean[segment]).square()
    variance = zeros.index_add(0, segment, squared) / (size - 1).clamp_min(1)
    return mean, variance.sqrt()
