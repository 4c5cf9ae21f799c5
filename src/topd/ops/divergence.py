"""Divergences between next-token distributions: exact on a given vocabulary, and the usual single-sample estimates."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def kl_divergence(
    logprobs_p: Float[Tensor, "*batch vocab"], logprobs_q: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """KL(p || q) in nats, over the last axis. Entries with p = 0 contribute nothing."""
    p = torch.exp(logprobs_p)
    return torch.where(p > 0, p * (logprobs_p - logprobs_q), 0.0).sum(-1)


def proximal_teacher(
    teacher_logprobs: Float[Tensor, "*batch vocab"], student_logprobs: Float[Tensor, "*batch vocab"], *, alpha: float
) -> Float[Tensor, "*batch vocab"]:
    """Log-probs of alpha * teacher + (1 - alpha) * student. For analysis and tests: training never builds it."""
    if alpha == 1:
        return teacher_logprobs
    return torch.logaddexp(teacher_logprobs + math.log(alpha), student_logprobs + math.log1p(-alpha))


def k2(log_ratio: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """Estimate of KL(p || q) from samples of p, with log_ratio = log q - log p: biased, never negative, with the KL's gradient.

    Source: J. Schulman, "Approximating KL divergence" (2020), as is k3.
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """exp(x) - 1 - x: unbiased and never negative. `expm1` avoids cancellation near 0."""
    return torch.expm1(log_ratio) - log_ratio
