"""From per-token rewards to per-token returns, within each completion of a flat ragged batch."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def immediate_plus_mean_future(rewards: Float[Tensor, " token"], lengths: Int[Tensor, " rollout"]) -> Float[Tensor, " token"]:
    """Immediate reward plus the mean of the later rewards of the same completion.

        return_k = reward_k + sum_{j > k} reward_j / (K - k),   k = 1..K

    The last token has no future: its return is its reward. Linear in tokens; sums are accumulated in float64, because one
    running sum over the batch is cut into completions by subtraction.
    Source: TOP-D, arXiv 2607.04751, Eq. 8 (the length-normalised return of MiniLLM, arXiv 2306.08543).
    """
    future_sum, num_later = _future_sums(rewards, lengths)
    return (rewards + future_sum / num_later.clamp_min(1)).to(rewards.dtype)


def discounted(rewards: Float[Tensor, " token"], lengths: Int[Tensor, " rollout"], *, discount: float) -> Float[Tensor, " token"]:
    """return_k = reward_k + discount * return_{k+1} inside a completion; `discount` 0 is the reward alone, 1 the plain sum."""
    returns = rewards.clone()
    ends = lengths.cumsum(0)
    for back in range(1, int(lengths.max()) if len(lengths) else 0):
        at = ends[lengths > back] - 1 - back
        returns[at] = rewards[at] + discount * returns[at + 1]
    return returns


def _future_sums(
    rewards: Float[Tensor, " token"], lengths: Int[Tensor, " rollout"]
) -> tuple[Float[Tensor, " token"], Int[Tensor, " token"]]:
    """Sum of the rewards after each token in its completion (float64; infinite ones counted apart), and how many there are."""
    infinite = rewards.isinf()
    running = rewards.to(torch.float64).masked_fill(infinite, 0.0).cumsum(0)
    infinities = torch.where(infinite, rewards.sign(), 0.0).to(torch.float64).cumsum(0)
    ends = lengths.cumsum(0)
    last = torch.repeat_interleave(ends - 1, lengths)
    position = torch.arange(len(rewards), device=rewards.device)
    future_infinities = infinities[last] - infinities
    future = (running[last] - running).masked_fill(future_infinities < 0, -torch.inf)
    return future.masked_fill(future_infinities > 0, torch.inf), last - position
