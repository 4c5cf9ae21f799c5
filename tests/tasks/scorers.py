"""Scorers that misbehave. They are imported by worker processes, so nothing heavy is imported here."""

import os
from dataclasses import dataclass

from topd.tasks.task import Problem


@dataclass(frozen=True)
class Buggy:
    """A scorer that raises for one question, and is content with any answer to others."""

    question: str

    def __call__(self, answer: str, problem: Problem) -> float:
        if problem.question == self.question:
            raise RuntimeError("a bug of the scorer")
        return 1.0


def picky(answer: str, of: Problem) -> float:
    if answer == "bad":
        raise ZeroDivisionError("division by zero")
    return {"three": 3.0, "minus": -3.0}.get(answer, 1.0)


def die(answer: str, of: Problem) -> float:
    return os.abort() if answer == "kill" else 0.0
