"""Scorers that misbehave. They are imported by worker processes, so nothing heavy is imported here."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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


def misbehave(answer: str, of: Problem) -> float:
    """Does what the answer says; any other answer is right. `of.answer` is a file, for what is done only once."""
    child, parent = os.getpid(), os.getppid()
    match answer:
        case "abort":
            os.abort()
        case "exit":
            sys.exit(3)
        case "allocate":
            return float(len(bytearray(5 << 30)))
        case "sleep":
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # the worker's own limit, shortened
            time.sleep(60)
        case "hurry":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "limits":
            raise RuntimeError(f"{signal.getitimer(signal.ITIMER_PROF)[0]:.1f} {signal.getitimer(signal.ITIMER_REAL)[0]:.0f}")
        case "kill parent":
            os.kill(parent, signal.SIGKILL)
        case "kill all":
            os.killpg(0, signal.SIGKILL)
        case "kill all once" if not Path(of.answer or "").exists():
            Path(of.answer or "").touch()
            os.killpg(0, signal.SIGKILL)
        case "processes":
            time.sleep(0.2)
            raise RuntimeError(f"{parent} {child}")
    return 1.0
