"""Trust Region Policy Distillation (TOP-D), arXiv 2607.04751.

For one prompt with G completions sampled by the policy that starts the step:

    log_ratio = teacher_logprob - behaviour_logprob                 0 where it is rounding (see below)
    reward    = log(alpha * exp(log_ratio) + 1 - alpha)             the proximal teacher's log-ratio: never below log(1 - alpha)
    return_k  = reward_k + mean(reward_j for j > k)                 last token: its reward alone        (Eq. 8)
    advantage = (return - mean) / max(std, std_floor)               over all sampled tokens of the group
    loss      = -min(r A, clip(r, 1 - clip, 1 + clip) A)            mean over the group's tokens, then over prompts

The rollout batch is cut into mini-batches and reused for several such updates; that reuse, bounded by the clip, is the
internal trust region. Every step of the credit is a key, so the paper's ablations and its relatives are one changed line.

Left open by the paper, decided here: the last token's return (its reward alone), and the unbiased std with a floor of 1e-6
(prime-rl's proposal; another public implementation divides by the population std + 1e-6).

Not in the paper: rounding is agreement (docs/decisions/0020-noise-of-low-precision.md). A log-ratio within 1e-4 nats of 0 is 0,
and a group whose log-ratios have a root mean square of at most `rounding` gets reward, return and advantage 0.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from topd.config import AlgorithmConfig, Dtype
from topd.ops.advantage import normalize_over_rollouts, normalize_over_tokens
from topd.ops.objective import clipped_surrogate, is_clipped
from topd.ops.proximal import (
    ROUNDING,
    ROUNDING_BFLOAT16,
    clipped_reward,
    floor_reward,
    in_agreement,
    power_reward,
    proximal_reward,
    without_rounding,
)
from topd.ops.returns import discounted, immediate_plus_mean_future
from topd.ops.weighting import group_token_mean, tokens_per_group
from topd.ragged import Ragged
from topd.types import Credit, Forward

NEEDS = frozenset({"teacher_logprobs"})
WEIGHTING = group_token_mean

_READ_WITH = {
    "alpha": ("reward", ("proximal",)),
    "reward_bound": ("reward", ("clipped", "floor")),
    "reward_power": ("reward", ("power",)),
    "discount": ("returns", ("discounted",)),
    "std_floor": ("normalize", ("group_tokens", "group_rollouts", "batch_tokens")),
}
"""Key -> the key that decides if it is read, and the values with which it is."""


class Config(AlgorithmConfig):
    type: Literal["topd"] = "topd"
    alpha: float = Field(
        0.2, gt=0, le=1, description="Share of the teacher in the proximal teacher (paper: 0.1 to 0.3). 1: plain log-ratio."
    )
    clip: float = Field(0.2, gt=0, lt=1, description="The importance ratio is clipped to 1 - clip, 1 + clip.")
    std_floor: float = Field(1e-6, gt=0, description="Smallest standard deviation a group is divided by.")
    rounding: float | None = Field(
        None,
        ge=0,
        description="Nats. A group whose log-ratios have at most this root mean square has no signal: its advantages are 0. "
        "Default: 0.1 where trainer, teacher or rollout servers compute in bfloat16, 1e-4 elsewhere.",
    )
    reward: Literal["proximal", "log_ratio", "clipped", "power", "floor"] = Field(
        "proximal", description="Per-token reward. All except proximal are for comparisons and do not use alpha."
    )
    reward_bound: float = Field(
        5.0, gt=0, description="clipped: rewards lie in -bound, bound. floor: they are never below -bound."
    )
    reward_power: float = Field(1.0, gt=0, description="power: exponent of the probabilities.")
    returns: Literal["mean_of_future", "immediate", "discounted"] = Field(
        "mean_of_future", description="Credit for later rewards (Eq. 8)."
    )
    discount: float = Field(0.95, ge=0, le=1, description="discounted: weight of the next token's return.")
    normalize: Literal["group_tokens", "group_rollouts", "batch_tokens", "none"] = Field(
        "group_tokens",
        description="Scope of standardisation. group_rollouts: by the mean and std of the completions' mean returns.",
    )

    def in_precision(self, dtype: Dtype) -> "Config":
        if self.rounding is not None:
            return self
        return self.model_copy(update={"rounding": ROUNDING_BFLOAT16 if dtype == "bfloat16" else ROUNDING})

    def judge_noise(self, largest: float) -> tuple[bool, str]:
        rounding = self.rounding or 0.0
        if largest <= rounding:
            return False, f": no advantage, as algorithm.rounding = {rounding:g}"
        return True, (
            f". That is above algorithm.rounding = {rounding:g}: once student and teacher agree, advantages are rounding errors, "
            f"and the student drifts. Set algorithm.rounding = {2 * largest:.1g}, or float32 for teacher and trainer."
        )

    @property
    def min_group_size(self) -> int:
        return 2 if self.normalize.startswith("group") else 1

    def floor(self) -> tuple[float, str] | None:
        match self.reward:
            case "proximal" if self.alpha < 1:
                return math.log1p(-self.alpha), f"log(1 - alpha) with alpha = {self.alpha:g}"
            case "clipped" | "floor":
                return -self.reward_bound, f"-reward_bound = {-self.reward_bound:g}"
            case "power":
                return -1.0, "a difference of two powers of probabilities"
        return None

    def units(self) -> dict[str, str]:
        reward = "probability" if self.reward == "power" else "nats"
        scopes = {"group_tokens": "group std", "group_rollouts": "group std", "batch_tokens": "batch std", "none": reward}
        return {"token_reward": reward, "return": reward, "advantage": scopes[self.normalize]}

    def unread(self) -> dict[str, str]:
        return {
            key: f'algorithm.{other} = "{value}"'
            for key, (other, readers) in _READ_WITH.items()
            if (value := getattr(self, other)) not in readers
        }

    def advice(self) -> dict[str, str]:
        bounded = "A reward with a floor: algorithm.reward = proximal with algorithm.alpha below 1."
        return {
            **dict.fromkeys(
                ("teacher/log_ratio_p01", "train/grad_norm_max", "teacher/gap") if self.floor() is None else (), bounded
            ),
            "token_reward/floor_share": "A lower algorithm.alpha gives a nearer target.",
        }


def credit(evidence: Ragged, config: Config) -> Credit:
    teacher, behaviour = evidence["teacher_logprobs"], evidence["behaviour_logprobs"]
    rounding = ROUNDING if config.rounding is None else config.rounding
    agreed = in_agreement(teacher - behaviour, evidence.tokens_per_group, rounding=rounding)
    rewards = token_rewards(teacher, behaviour, config).masked_fill(agreed, 0.0)
    returns = token_returns(rewards, evidence.lengths, config)
    advantages = normalized(returns, evidence.lengths, evidence.group_sizes, config)
    return Credit(advantages=advantages, token_rewards=rewards, returns=returns)


def objective(forward: Forward, batch: Ragged, config: Config) -> tuple[Float[Tensor, " token"], Tensor]:
    log_importance = forward.logprobs - batch["old_logprobs"].detach()
    loss = clipped_surrogate(log_importance, batch["advantages"], clip_low=config.clip, clip_high=config.clip)
    return loss, is_clipped(log_importance.detach(), batch["advantages"], clip_low=config.clip, clip_high=config.clip)


def token_rewards(
    teacher_logprobs: Float[Tensor, " token"], behaviour_logprobs: Float[Tensor, " token"], config: Config
) -> Float[Tensor, " token"]:
    """Per-token reward, by `config.reward`."""
    log_ratio = without_rounding(teacher_logprobs - behaviour_logprobs)
    match config.reward:
        case "proximal":
            return proximal_reward(log_ratio, alpha=config.alpha)
        case "log_ratio":
            return log_ratio
        case "clipped":
            return clipped_reward(log_ratio, low=-config.reward_bound, high=config.reward_bound)
        case "power":
            return power_reward(log_ratio, behaviour_logprobs, exponent=config.reward_power)
        case "floor":
            return floor_reward(log_ratio, floor=-config.reward_bound)


def token_returns(rewards: Float[Tensor, " token"], lengths: Int[Tensor, " rollout"], config: Config) -> Float[Tensor, " token"]:
    """Per-token return, by `config.returns`."""
    match config.returns:
        case "mean_of_future":
            return immediate_plus_mean_future(rewards, lengths)
        case "immediate":
            return rewards
        case "discounted":
            return discounted(rewards, lengths, discount=config.discount)


def normalized(
    returns: Float[Tensor, " token"], lengths: Int[Tensor, " rollout"], group_sizes: Int[Tensor, " group"], config: Config
) -> Float[Tensor, " token"]:
    """Per-token advantage, by `config.normalize`."""
    match config.normalize:
        case "group_tokens":
            return normalize_over_tokens(returns, tokens_per_group(lengths, group_sizes), std_floor=config.std_floor)
        case "group_rollouts":
            mean_returns = torch.segment_reduce(returns, "mean", lengths=lengths)
            return torch.repeat_interleave(
                normalize_over_rollouts(mean_returns, group_sizes, std_floor=config.std_floor), lengths
            )
        case "batch_tokens":
            return normalize_over_tokens(returns, lengths.sum().reshape(1), std_floor=config.std_floor)
        case "none":
            return returns
