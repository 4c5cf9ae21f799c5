"""The nouns, one per stage. Each stage returns a new object; none fills in a field of an older one.

    Prompt -> RolloutGroup -> ScoredGroup -> TrainBatch -> StepReport

One index convention: position k of every stream talks about token k of the completion. The one-token shift of causal
models happens in models/logprobs.py and nowhere else. Units: log-probs in nats, lengths in tokens.

The worked example below follows one prompt with two completions through all stages (alpha = 0.2).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length"]

_STREAMS = ("old_logprobs", "advantages", "weights")


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
    """What the grader compares with. None: completions of this prompt are not graded."""
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
    """A group with everything credit needs. One tensor per completion, each as long as the completion.

    ScoredGroup(group=RolloutGroup(...),
        rewards            = tensor([1., 0.]),
        behaviour_logprobs = (tensor([-0.5, -1.0, -0.2]), tensor([-0.4, -0.1])),
        old_logprobs       = (tensor([-0.5, -1.0, -0.2]), tensor([-0.4, -0.1])),
        teacher_logprobs   = (tensor([-0.3, -2.0, -0.2]), tensor([-0.1, -0.6])))
    """

    group: RolloutGroup
    rewards: Float[Tensor, " rollout"]
    """Grade of each completion, in [0, 1]; 0 where nothing was graded."""
    behaviour_logprobs: tuple[Tensor, ...]
    """The student's side of the reward: computed by the same kind of engine as the teacher's."""
    old_logprobs: tuple[Tensor, ...]
    """The trainer's own log-probs before the first update: the denominator of the importance ratio."""
    teacher_logprobs: tuple[Tensor, ...] | None
    num_grader_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditInput:
    """The scored groups of a step as flat streams: what an algorithm's `credit` sees.

    lengths = [3, 2]; group_sizes = [2]; every `token` stream holds 5 numbers
    """

    lengths: Int[Tensor, " rollout"]
    group_sizes: Int[Tensor, " group"]
    rewards: Float[Tensor, " rollout"]
    behaviour_logprobs: Float[Tensor, " token"]
    teacher_logprobs: Float[Tensor, " token"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an algorithm gives back, per token: the advantage, and the reward and return it came from (metrics, storage).

    rewards    = [0.043, -0.135, 0.0, 0.068, -0.082]
    returns    = [-0.024, -0.135, 0.0, -0.014, -0.082]      here: reward + mean of the later rewards
    advantages = [0.477, -1.491, 0.908, 0.653, -0.547]
    """

    advantages: Float[Tensor, " token"]
    token_rewards: Float[Tensor, " token"]
    returns: Float[Tensor, " token"]
    """Reward with the credit for what followed, before it is normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """One group as the trainer sees it; streams are flat over the tokens of its completions, in order."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    old_logprobs: Float[Tensor, " token"]
    advantages: Float[Tensor, " token"]
    weights: Float[Tensor, " token"]
    """Share of each token in the loss. Over a mini-batch they sum to 1."""

    def rows(self, start: int, stop: int) -> "TrainGroup":
        """The same prompt with some of the completions, and their streams."""
        lengths = [len(completion) for completion in self.completions]
        begin, end = sum(lengths[:start]), sum(lengths[:stop])
        streams = {name: getattr(self, name)[begin:end] for name in _STREAMS}
        return dataclasses.replace(self, completions=self.completions[start:stop], **streams)

    def to(self, device: torch.device) -> "TrainGroup":
        """The same group with its streams on `device`."""
        streams = {name: getattr(self, name).to(device) for name in _STREAMS}
        return dataclasses.replace(self, **streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One mini-batch (or a micro-batch cut out of it): whole groups, and the same streams over all of them."""

    groups: tuple[TrainGroup, ...]

    @property
    def old_logprobs(self) -> Float[Tensor, " token"]:
        return torch.cat([group.old_logprobs for group in self.groups])

    @property
    def advantages(self) -> Float[Tensor, " token"]:
        return torch.cat([group.advantages for group in self.groups])

    @property
    def weights(self) -> Float[Tensor, " token"]:
        return torch.cat([group.weights for group in self.groups])

    def to(self, device: torch.device) -> "TrainBatch":
        """The same batch with its streams on `device`."""
        return TrainBatch(groups=tuple(group.to(device) for group in self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer update. Sums and counts, so that reports of micro-batches, updates and ranks add up.

    UpdateReport(loss=-0.003, grad_norm=1.7, learning_rate=3e-4, log_ratio=tensor([...]), clipped=tensor([...]))
    """

    loss: float
    grad_norm: float
    learning_rate: float
    log_ratio: Float[Tensor, " token"]
    """log of the importance ratio of every token of the mini-batch, in its order, before the update."""
    clipped: Bool[Tensor, " token"]
    """Whether the token was without gradient because of a clip."""

    @property
    def num_tokens(self) -> int:
        return len(self.log_ratio)


StepReport = Sequence[UpdateReport]
"""The updates of one step, in order."""
