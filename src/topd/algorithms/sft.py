"""Supervised fine-tuning on demonstrations: cross-entropy, mean over all completion tokens of the mini-batch.

loss = -logprob                 no sampling, no teacher; also the off-policy cold start before distillation
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from topd.config import AlgorithmConfig
from topd.ops.objective import negative_log_likelihood
from topd.ops.weighting import token_mean
from topd.ragged import Ragged
from topd.types import Credit, Forward

NEEDS = frozenset({"demonstrations"})
WEIGHTING = token_mean


class Config(AlgorithmConfig):
    type: Literal["sft"] = "sft"

    def units(self) -> dict[str, str]:
        return dict.fromkeys(("token_reward", "return", "advantage"), "weight")


def credit(evidence: Ragged, config: Config) -> Credit:
    """Every demonstrated token is wanted equally: advantage 1."""
    ones = torch.ones(int(evidence.lengths.sum()))
    zeros = torch.zeros_like(ones)
    return Credit(advantages=ones, token_rewards=zeros, returns=zeros)


def objective(forward: Forward, batch: Ragged, config: Config) -> tuple[Float[Tensor, " token"], Tensor]:
    return negative_log_likelihood(forward.logprobs), torch.zeros_like(forward.logprobs, dtype=torch.bool)
