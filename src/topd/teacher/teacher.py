"""Protocol of teachers: log-probs of the tokens that the student sampled."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.models.logprobs import SLACK, TokenGroup
from topd.ragged import Ragged
from topd.rollout.engine import Engine
from topd.types import RolloutGroup

Scores = tuple[Tensor, ...]
"""Of one group: one float32 tensor of log-probs (nats) per completion, as long as the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict on whether things fit."""

    name: str
    ok: bool
    detail: str
    warning: bool = False
    """Passed, but the user should look at it."""
    unproven: bool = False
    """Passed without a comparison."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why a group has no scores. It is dropped and counted."""

    reason: str


@runtime_checkable
class Teacher(Protocol):
    """A frozen model that scores completions."""

    @property
    def honours_temperature(self) -> bool:
        """True if its log-probs are at the sampling temperature; else only temperature 1 is correct."""

    @property
    def engine_kind(self) -> str:
        """Backend that computes its log-probs. Rollouts of the same kind are compared by the engines' own numbers."""

    @property
    def context_length(self) -> int | None: ...

    @property
    def context_note(self) -> str:
        """Reason why the context is shorter than the model's own; else empty."""

    def checks(self, student: LanguageModel, *, asked: bool) -> list[Check]:
        """Checks that it and the student have the same tokens and, if credit uses it (`asked`), the same end tokens."""

    def prefetch(self, groups: Sequence[RolloutGroup]) -> None:
        """Announce groups for a later `score`, so that work on them may start."""

    @property
    def gives(self) -> Set[str]:
        """Streams of evidence.EVIDENCE that `score` can give."""

    def score(
        self, groups: Sequence[RolloutGroup], wanted: Wanted = ..., *, on_tokens: Callable[[int], None] = ...
    ) -> list[Ragged | Unscored]:
        """The wanted streams of every group, in order."""

    def engine(self) -> Engine:
        """To sample from the teacher itself, for its evaluation."""

    def counts(self) -> Mapping[str, int]:
        """Requests, retries and cached completions since this was last asked; empty for a teacher loaded here."""


@runtime_checkable
class OneTeacher(Teacher, Protocol):
    """A teacher that is one model and can score any tokens."""

    @property
    def temperature(self) -> float:
        """Of its log-probs."""

    def log_probs(self, groups: Sequence[TokenGroup], *, temperature: float | None = None) -> list[Scores]:
        """Of these very tokens, without map_eos and cache, by default at its temperature. Raises a Fault without an answer."""


def scored(group: TokenGroup, **streams: Sequence[Tensor]) -> Ragged:
    """Evidence of one group. `streams`: of every completion one tensor, joined here."""
    return Ragged.of([group.completions]).adding(**{name: torch.cat(list(parts)) for name, parts in streams.items()})


def broken_scores(group: TokenGroup, scores: Ragged) -> str | None:
    """Reason why these cannot be evidence about the group's tokens; None if they can."""
    wanted = sum(map(len, group.completions))
    for name, numbers in scores.tokens.items():
        if len(numbers) != wanted:
            return f"{name}: {len(numbers)} entries for {wanted} tokens"
        if name.endswith("logprobs") and (bool(numbers.isnan().any()) or float(numbers.max()) > SLACK):
            return f"{name}: NaN or above 0: the teacher's weights or server are broken"
    return None
