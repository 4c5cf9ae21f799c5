"""What a task is: problems to train on, held-out problems, and a grade for an answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Score = Callable[[str, "Problem"], float]
"""(answer found in a completion, its problem) -> grade in [0, 1]. May raise; grading.py turns that into 0 and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question before any tokenizer has seen it."""

    question: str
    answer: str | None = None
    domain: str = "default"
    demonstration: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems and their scorer. `held_out` shares no question with `train`."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    score: Score


def unique(problems: Sequence[Problem]) -> list[Problem]:
    """The first problem of every question; a question counted twice would narrow intervals for nothing."""
    return list({problem.question: problem for problem in reversed(problems)}.values())[::-1]


def without_leaks(train: Sequence[Problem], held_out: Sequence[Problem]) -> list[Problem]:
    """The training problems whose question is not also held out."""
    questions = {problem.question for problem in held_out}
    return [problem for problem in train if problem.question not in questions]
