"""Experiment trackers beside a run: metrics, evaluations and the final table -> TensorBoard, wandb, trackio, MLflow.

A tracker never stops, delays or changes a run. Each is fed by a thread of its own, from a bounded queue, and runs in a process
of its own (child.py); what it fails at is said in one line. Nothing heavy is imported here: the processes import this too.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from topd.errors import ConfigError, RunStopped
from topd.run.catalogue import renamed
from topd.run.files import read_lines
from topd.run.observer import Observer
from topd.trackers.feeder import Feeder, Message

FLUSH_S = 30.0
"""Seconds that all trackers together have at the end to write what they were given."""

ANSWER_S = 10.0
"""Seconds in which a tracker should have begun. After them it is said that it has not."""

UNANSWERED_S = 5.0
"""Seconds that are left, at the end and after ANSWER_S, to a tracker that never got anything through."""

SILENT_S = 5.0
"""Seconds of them that pass before the wait is announced."""

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""What each tracker imports. The extra has the tracker's name."""


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for the first tracker whose packages are not installed."""
    for name in names:
        for package in PACKAGES[name]:
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # without an origin: a mere folder of that name, as wandb leaves
                raise ConfigError(
                    f'run.trackers: "{name}" needs the Python package {package}, which is not installed. Install it with '
                    f"pip install 'topd[{name}]', or remove \"{name}\"."
                )


class Trackers(Observer):
    """The trackers of one run. Raises ConfigError if a package is missing; starts nothing before `open`."""

    def __init__(self, names: Sequence[str], path: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        check_installed(names)
        self._names = names
        self._path = path
        self._config = config
        self._say = say
        self._feeders: list[Feeder] = []
        self._late: set[str] = set()
        self._summary: Mapping[str, Any] | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopped = isinstance(error, KeyboardInterrupt | RunStopped)
        self._close("finished" if error is None else "stopped" if stopped else "failed")

    def open(self, steps_done: int) -> None:
        """Start the trackers, and bring each up to date with what the run folder holds already."""
        if not self._names:
            return
        history: list[Message] = [{"row": renamed(row)} for row in read_lines(self._path / "metrics.jsonl")]
        history += [{"evaluation": row} for row in read_lines(self._path / "evals.jsonl")]
        history.sort(key=lambda message: next(iter(message.values()))["step"])
        begin = {"path": str(self._path.resolve()), "config": self._config, "steps_done": steps_done}
        for name in self._names:
            feeder = Feeder(name, [{"begin": begin}, *history])
            self._feeders.append(feeder)
            feeder.start()

    def step(self, row: Mapping[str, Any]) -> None:
        self._put({"row": row})

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._put({"evaluation": row})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Kept until the run has ended."""
        self._summary = summary

    def _put(self, message: Message) -> None:
        for feeder in self._feeders:
            feeder.put(message)
        self._tell()

    def _tell(self) -> None:
        """Say once of each tracker that has failed since, and let go of it; say once of each that has not begun in time."""
        for feeder in self._failed():
            self._say(f"{_off(feeder)} Training goes on; a resumed run brings it up to date.")
        for feeder in self._feeders:
            if not feeder.answered and feeder.tracker not in self._late and time.monotonic() > feeder.begun + ANSWER_S:
                self._late.add(feeder.tracker)
                self._say(f"tracker {feeder.tracker} has not answered for {ANSWER_S:.0f} s; training goes on")

    def _failed(self) -> list[Feeder]:
        """Those that have failed since the last call."""
        failed = [feeder for feeder in self._feeders if feeder.failure is not None]
        self._feeders = [feeder for feeder in self._feeders if feeder not in failed]
        return failed

    def _close(self, status: str) -> None:
        """End the trackers within FLUSH_S. However this ends (a second Ctrl-C), none of their processes is left."""
        feeders = list(self._feeders)
        try:
            for feeder in feeders:
                feeder.put({"finish": {"status": status, "summary": self._summary}})
            self._wait(feeders)
        finally:
            for feeder in feeders:
                feeder.end()
        for feeder in self._failed():
            self._say(f"{_off(feeder)} {self._remedy(feeder)}")

    def _wait(self, feeders: Sequence[Feeder]) -> None:
        ended = time.monotonic()
        announced = False
        while waiting := [feeder for feeder in feeders if feeder.is_alive() and feeder.failure is None]:
            left = [_deadline(feeder, ended) - time.monotonic() for feeder in waiting]
            for feeder, seconds in zip(waiting, left, strict=True):
                if seconds <= 0:
                    feeder.fail(f"it was not done {FLUSH_S:.0f} s after the end" if feeder.answered else "it never answered")
            if not announced and time.monotonic() > ended + SILENT_S and max(left) > 0:
                announced = True
                names = ", ".join(feeder.tracker for feeder in waiting)
                self._say(f"waiting up to {max(left):.0f} s for {names} (Ctrl-C ends the wait)")
            waiting[0].join(0.02)

    def _remedy(self, feeder: Feeder) -> str:
        """What can be done for a tracker that missed something, now that training is over."""
        resume = "the same command with --run.resume true"
        if feeder.by_hand is None:
            return f"{self._path} holds everything; {resume} brings the tracker up to date."
        return f"To send what it kept: {feeder.by_hand}" + ("" if feeder.has_all else f"; to send the rest: {resume}")


def _off(feeder: Feeder) -> str:
    return f"tracker {feeder.tracker} is off: {feeder.failure}."


def _deadline(feeder: Feeder, ended: float) -> float:
    """When a tracker is given up: early if it never got anything through."""
    if feeder.answered:
        return ended + FLUSH_S
    return min(ended + FLUSH_S, max(ended, feeder.begun + ANSWER_S) + UNANSWERED_S)
