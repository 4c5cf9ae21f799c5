"""Protocol of engines: completions of prompts, with the log-prob of every sampled token."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from topd.endpoint.background import Background
from topd.endpoint.cache import ScoreCache
from topd.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Shared by the engine and the teachers of a run, for their `make`."""

    background: Background
    """Event loop in a thread, for clients of servers."""
    opened: ExitStack
    """Closed at the end of the run, after `background`: enter here what must be closed."""
    cache: ScoreCache | None = None
    """Scores on disk, if a teacher is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names where it has them."""

    n: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: tuple[int | str, ...] = (0,)
    """Names the random stream. A completion depends on it, the prompt's id and its number in the group, on nothing else."""


@runtime_checkable
class Engine(Protocol):
    """Samples from the policy it was last given."""

    kind: str
    """Backend that computes the log-probs; "embedded" is topd itself."""
    policy_version: int
    tolerance: float | None
    """Nats by which its log-probs may differ from the trainer's, on average over a group; None: they are not compared."""

    @property
    def exact(self) -> bool:
        """True if its log-probs equal the trainer's to float32 rounding, so that none are recomputed."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion that fit, where that may be less than the model's own; None if not known."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = ...,
        on_groups: Callable[[Sequence[RolloutGroup]], None] = ...,
    ) -> list[RolloutGroup]:
        """One group per prompt, in order.

        `on_tokens` is told how many tokens were sampled since it was last called, `on_groups` of groups as they are complete.
        """

    def load_weights(self, policy_version: int) -> None:
        """Take over the trainer's weights, which are now of that version. Raises RunStopped if that cannot be proven."""

    def describe(self) -> str:
        """Short description of the engine and its state."""


@runtime_checkable
class AheadEngine(Engine, Protocol):
    """An engine that samples several steps ahead (`rollout.max_lag` > 1)."""

    def publish(self, policy_version: int) -> None:
        """Store the trainer's weights as they are now; `generate` takes the newest before it begins. Any thread may call it."""
