"""Group Relative Policy Optimization (GRPO), outcome supervision, arXiv 2402.03300.

    advantage = (reward - mean of the group) / max(std of the group, std_floor)     one number for all tokens of a completion
    loss      = -min(r A, clip(r, 1 - clip, 1 + clip) A)                            mean over tokens, then over completions

Differs from the paper: no KL term to a reference model (as in DAPO and in the GRPO baseline of arXiv 2607.04751).
"""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from topd.config import AlgorithmConfig
from topd.ops.advantage import normalize_over_rollouts
from topd.ops.objective import clipped_surrogate, is_clipped
from topd.ops.weighting import rollout_mean
from topd.ragged import Ragged
from topd.types import Credit, Forward

NEEDS = frozenset({"answers"})
WEIGHTING = rollout_mean


class Config(AlgorithmConfig):
    type: Literal["grpo"] = "grpo"
    clip: float = Field(0.2, gt=0, lt=1, description="The importance ratio is clipped to 1 - clip, 1 + clip.")
    std_floor: float = Field(1e-6, gt=0, description="Smallest standard deviation a group is divided by.")

    def units(self) -> dict[str, str]:
        return {"token_reward": "grade", "return": "grade", "advantage": "group std"}

    @property
    def min_group_size(self) -> int:
        return 2


def credit(evidence: Ragged, config: Config) -> Credit:
    advantages = normalize_over_rollouts(evidence["grades"], evidence.group_sizes, std_floor=config.std_floor)
    rewards = torch.repeat_interleave(evidence["grades"], evidence.lengths)
    return Credit(
        advantages=torch.repeat_interleave(advantages, evidence.lengths),
        token_rewards=rewards,
        returns=rewards,
    )


def objective(forward: Forward, batch: Ragged, config: Config) -> tuple[Float[Tensor, " token"], Tensor]:
    log_importance = forward.logprobs - batch["old_logprobs"].detach()
    loss = clipped_surrogate(log_importance, batch["advantages"], clip_low=config.clip, clip_high=config.clip)
    return loss, is_clipped(log_importance.detach(), batch["advantages"], clip_low=config.clip, clip_high=config.clip)
