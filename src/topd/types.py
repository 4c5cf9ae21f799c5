"""The nouns, one per stage. Each stage returns a new object; none fills in a field of an older one.

    Prompt -> RolloutGroup -> ScoredGroup -> TrainBatch -> StepReport

One index convention: position k of every stream talks about token k of the completion. The one-token shift of causal
models happens in models/logprobs.py and nowhere else. Units: log-probs in nats, lengths in tokens.

The worked example below follows one prompt with two completions through all stages (alpha = 0.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from topd.ragged import Ragged

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question, ready to be sampled from.

    Prompt(id="train/7", text="3+4+5=", token_ids=(5, 12, 6, 12, 7, 14), answer="12", domain="sums")
    """

    id: str
    """Unique within the task; also the seed of its random numbers."""
    text: str
    token_ids: tuple[int, ...]
    answer: str | None = None
    """Reference for the grader. None: completions of this prompt are not graded."""
    domain: str = "default"
    demonstration: str | None = None
    """A worked completion, for algorithms that learn from demonstrations."""
    problem: Any = None
    """The task's own object behind the prompt (tasks/task.py), which its grader is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion as sampled, end token included.

    Rollout(token_ids=(9, 14, 1), logprobs=tensor([-0.5, -1.0, -0.2]), finish_reason="stop", text="7=")
    """

    token_ids: tuple[int, ...]
    logprobs: Float[Tensor, " token"]
    """Log-prob of each token under the policy and temperature that sampled it, as the engine reports it."""
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt: the unit from sampling to loss.

    RolloutGroup(prompt=Prompt(...), rollouts=(Rollout(... 3 tokens), Rollout(... 2 tokens)), policy_version=0)
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    policy_version: int
    """Number of updates behind the weights that sampled it."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        return tuple(rollout.token_ids for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with the evidence that credit is made of.

    ScoredGroup(group=RolloutGroup(...), evidence=Ragged(lengths=[3, 2], group_sizes=[2],
        rollouts = {"grades":             [1., 0.]},
        tokens   = {"behaviour_logprobs": [-0.5, -1.0, -0.2, -0.4, -0.1],
                    "old_logprobs":       [-0.5, -1.0, -0.2, -0.4, -0.1],
                    "teacher_logprobs":   [-0.3, -2.0, -0.2, -0.1, -0.6]}))
    """

    group: RolloutGroup
    evidence: Ragged
    """Of one group. What each stream is stands in evidence.py."""
    num_grader_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Result of an algorithm, per token: the advantage, and the reward and return it came from (metrics, storage).

    rewards    = [0.043, -0.135, 0.0, 0.068, -0.082]
    returns    = [-0.024, -0.135, 0.0, -0.014, -0.082]      here: reward + mean of the later rewards
    advantages = [0.477, -1.491, 0.908, 0.653, -0.547]
    """

    advantages: Float[Tensor, " token"]
    token_rewards: Float[Tensor, " token"]
    returns: Float[Tensor, " token"]
    """Reward with the credit for what followed, before it is normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One mini-batch: whole groups, and what an objective needs of their tokens.

    `streams` are the evidence of the groups with `advantages` and `weights`: the share of each token in the loss. Over a
    mini-batch they sum to 1.
    """

    groups: tuple[RolloutGroup, ...]
    streams: Ragged


OverVocabulary = Callable[[Float[Tensor, "chunk vocab"], slice], Tensor]
"""Function of the log-probs of the whole vocabulary at some of the tokens, and of which tokens these are: [chunk, ...]."""


def _none(function: OverVocabulary) -> Tensor:
    raise ValueError("this forward pass was made without the output head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The policy's distributions at the tokens of a micro-batch. Gradient flows through everything that it gives.

    `logprobs` are those of the tokens themselves, in nats.
    """

    logprobs: Float[Tensor, " token"]
    over_vocabulary: Callable[[OverVocabulary], Tensor] = _none
    """Applies a function chunk by chunk and joins the results: [token, ...]. A chunk's logits are recomputed in the backward
    pass, so that memory does not grow with the number of tokens."""

    def logprobs_of(self, token_ids: Int[Tensor, "token k"]) -> Float[Tensor, "token k"]:
        """Log-probs of given tokens at every position."""
        return self.over_vocabulary(lambda logprobs, rows: logprobs.gather(-1, token_ids[rows]))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer update. Sums and counts, so that reports of micro-batches, updates and ranks add up.

    UpdateReport(loss=-0.003, grad_norm=1.7, learning_rate=3e-4, log_importance=tensor([...]), clipped=tensor([...]))
    """

    loss: float
    grad_norm: float
    learning_rate: float
    log_importance: Float[Tensor, " token"]
    """log of the importance ratio of every token of the mini-batch, in its order, before the update."""
    clipped: Bool[Tensor, " token"]
    """True if a clip left the token without gradient."""

    @property
    def num_tokens(self) -> int:
        return len(self.log_importance)


StepReport = Sequence[UpdateReport]
"""The updates of one step, in order."""
