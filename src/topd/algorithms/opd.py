"""On-policy distillation (OPD): the log-ratio itself as the advantage, token by token.

    advantage = teacher_logprob - behaviour_logprob          no return, no normalisation, no lower bound
    loss      = -min(r A, clip(r, 1 - clip, 1 + clip) A)     mean over all tokens of the mini-batch

Source: Thinking Machines, "On-Policy Distillation" (2025), and the OPD baseline of arXiv 2607.04751. That baseline makes one
update per rollout batch: set trainer.minibatch_prompts = rollout.prompts_per_step for it. With more updates the clip acts.
"""

from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from topd.config import AlgorithmConfig
from topd.ops.objective import clipped_surrogate, is_clipped
from topd.ops.weighting import token_mean
from topd.ragged import Ragged
from topd.types import Credit, Forward

NEEDS = frozenset({"teacher_logprobs"})
WEIGHTING = token_mean


class Config(AlgorithmConfig):
    type: Literal["opd"] = "opd"
    clip: float = Field(0.2, gt=0, lt=1, description="The importance ratio is clipped to 1 - clip, 1 + clip.")

    def advice(self) -> dict[str, str]:
        bounded = 'algorithm.type = "topd" has a reward with a floor.'
        return dict.fromkeys(("teacher/gap", "teacher/log_ratio_p01", "train/grad_norm_max"), bounded)


def credit(evidence: Ragged, config: Config) -> Credit:
    log_ratio = evidence["teacher_logprobs"] - evidence["behaviour_logprobs"]
    return Credit(advantages=log_ratio, token_rewards=log_ratio, returns=log_ratio)


def objective(forward: Forward, batch: Ragged, config: Config) -> tuple[Float[Tensor, " token"], Tensor]:
    log_importance = forward.logprobs - batch["old_logprobs"].detach()
    loss = clipped_surrogate(log_importance, batch["advantages"], clip_low=config.clip, clip_high=config.clip)
    return loss, is_clipped(log_importance.detach(), batch["advantages"], clip_low=config.clip, clip_high=config.clip)
