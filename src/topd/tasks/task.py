"""A task: problems to train on, held-out problems, and a grade for an answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from topd.errors import ConfigError
from topd.plugins import TASK

Score = Callable[[str, "Problem"], float]
"""(answer of a completion, its problem) -> grade in [0, 1]. May raise: grading.py turns that into 0 and a count. It is sent to
other processes, so it is a function of a module, or an object that can be pickled."""

Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question before any tokenizer has seen it."""

    question: str
    """The question alone, or the last of `messages`."""
    messages: tuple[Message, ...] = ()
    """All turns, the last one the user's, where the data gives a conversation; the system message is `system_prompt`."""
    system_prompt: str | None = None
    """This problem's own; None: that of the task's configuration."""
    answer: str | None = None
    """None: there is nothing to grade against. Never empty or blank."""
    answer_is_named: bool = True
    """False: only the scorer can tell a right answer, and `answer` says no more than that."""
    domain: str = "default"
    demonstration: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """Place in the data, for messages: "train.jsonl, line 3"."""

    @property
    def key(self) -> str:
        """Text of all turns, with white space normalised. Equal keys are the same question."""
        return " ".join(" ".join(message.content for message in self.messages).split() or self.question.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems and their scorer. `held_out` shares no question with `train`, holds each once, and each has an answer."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    score: Score
    whole_text: bool = False
    """Without a box, the whole completion is the answer, not its last line (tasks/answers.py)."""
    num_leaks: int = 0
    """Training problems left out because the held-out problems ask the same."""
    num_duplicates: int = 0
    """Held-out problems left out because an earlier one asks the same."""
    num_unanswered: int = 0
    """Held-out problems left out because they have no answer."""


def make_task(section: Any, *, seed: int) -> Task:
    """The task of a section. Raises ConfigError if the data cannot be found or read, or if there is nothing to train on."""
    task: Task = TASK.make(section, seed=seed)
    if not task.train:
        raise ConfigError(
            f'[task] has no training problems (type = "{section.type}"; problems that are also held out do not count). '
            "Give a data set with at least one, or more of them."
        )
    return task


def split_task(train: Sequence[Problem], held_out: Sequence[Problem], score: Score, *, whole_text: bool = False) -> Task:
    """A task without leaks, without duplicates and unanswered problems among those held out, all of them counted.

    Raises ConfigError if there are held-out problems and none has an answer.
    """
    kept = without_leaks(train, held_out)
    answered = [problem for problem in held_out if problem.answer is not None]
    if held_out and not answered:
        raise ConfigError(
            f"no held-out problem has an answer to grade against ({held_out[0].source} is the first). Give the field `answer`."
        )
    distinct = unique(answered)
    return Task(
        train=kept,
        held_out=distinct,
        score=score,
        whole_text=whole_text,
        num_leaks=len(train) - len(kept),
        num_duplicates=len(answered) - len(distinct),
        num_unanswered=len(held_out) - len(answered),
    )


def unique(problems: Sequence[Problem]) -> list[Problem]:
    """The first problem of every question; a question counted twice would narrow intervals for nothing."""
    return list({(problem.system_prompt, problem.key): problem for problem in reversed(problems)}.values())[::-1]


def without_leaks(train: Sequence[Problem], held_out: Sequence[Problem]) -> list[Problem]:
    """The training problems whose question is not also held out, whatever their white space and system prompts."""
    keys = {problem.key for problem in held_out}
    return [problem for problem in train if problem.key not in keys]


def refuse_contradictions(problems: Sequence[Problem]) -> None:
    """Raise ConfigError if a question comes twice with different answers: one of them must be wrong."""
    first: dict[tuple[str | None, str], Problem] = {}
    for problem in problems:
        if problem.answer is None:
            continue
        other = first.setdefault((problem.system_prompt, problem.key), problem)
        if other.answer != problem.answer and not _same_number(other.answer, problem.answer):
            raise ConfigError(
                f"{other.source} and {problem.source} ask the same question with different answers, {other.answer!r} and "
                f"{problem.answer!r}: {problem.question[:80]!r}. Keep one of them."
            )


def _same_number(one: str | None, other: str | None) -> bool:
    """True if two answers are the same number in two spellings: 4 and 4.0, 1072 and 1,072."""
    try:
        return Decimal((one or "").replace(",", "")) == Decimal((other or "").replace(",", ""))
    except InvalidOperation:
        return False
