"""What the loop asks of a teacher: log-probs of the very tokens the student sampled."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from topd.types import RolloutGroup


@runtime_checkable
class Teacher(Protocol):
    """A frozen model that scores completions."""

    honours_temperature: bool
    """Whether its log-probs are those at the sampling temperature. If not, only temperature 1 is right."""

    def score(self, groups: Sequence[RolloutGroup], *, on_tokens: Callable[[int], None] = ...) -> list[tuple[Tensor, ...]]:
        """For every group, one float32 tensor of log-probs (nats) per completion, as long as the completion."""
        ...
