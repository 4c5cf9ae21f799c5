"""Loss weights of the tokens of a mini-batch. All are positive and sum to 1 over the mini-batch.

The trainer's whole reduction is `(weights * token_loss).sum()`; micro-batches and ranks only split that sum, so they cannot
change it. Input: tokens per completion and completions per group, in order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Lengths = Int[Tensor, " rollout"]
Sizes = Int[Tensor, " group"]
Weights = Float[Tensor, " token"]


def group_token_mean(lengths: Lengths, group_sizes: Sizes) -> Weights:
    """Mean over the tokens of a group, then over groups: 1 / (groups * tokens of the group). Source: TOP-D, its objective."""
    tokens = tokens_per_group(lengths, group_sizes)
    return torch.repeat_interleave(1.0 / (len(tokens) * tokens.double()), tokens).float()


def rollout_mean(lengths: Lengths, group_sizes: Sizes) -> Weights:
    """Mean over the tokens of a completion, then over completions. Source: GRPO, arXiv 2402.03300, eq. 3."""
    return torch.repeat_interleave(1.0 / (len(lengths) * lengths.double()), lengths).float()


def token_mean(lengths: Lengths, group_sizes: Sizes) -> Weights:
    """Every token of the mini-batch counts the same. Source: DAPO, arXiv 2503.14476, section 3.3; usual in fine-tuning."""
    total = int(lengths.sum())
    return torch.full((total,), 1.0 / total, device=lengths.device)


def tokens_per_group(lengths: Lengths, group_sizes: Sizes) -> Sizes:
    """Number of tokens in each group."""
    group = torch.repeat_interleave(torch.arange(len(group_sizes), device=lengths.device), group_sizes)
    return torch.zeros_like(group_sizes).index_add(0, group, lengths)
