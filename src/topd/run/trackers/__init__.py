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
from topd.run.files import read_lines
from topd.run.trackers.feeder import Feeder, Message

FLUSH_S = 30.0
"""Seconds that all trackers together have at the end to write what they were given."""

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


class Trackers:
    """The trackers of one run. Begins nothing before `open`; as a context manager, ends them with the status of the block."""

    def __init__(self, names: Sequence[str], path: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._names = names
        self._path = path
        self._config = config
        self._say = say
        self._feeders: list[Feeder] = []
        self._summary: Mapping[str, Any] | None = None

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopped = isinstance(error, KeyboardInterrupt | RunStopped)
        self._close("finished" if error is None else "stopped" if stopped else "failed")

    def open(self, steps_done: int) -> None:
        """Start the trackers, and bring each up to date with what the run folder holds already."""
        if not self._names:
            return
        history: list[Message] = [{"row": row} for row in read_lines(self._path / "metrics.jsonl")]
        history += [{"evaluation": row} for row in read_lines(self._path / "evals.jsonl")]
        history.sort(key=lambda message: next(iter(message.values()))["step"])
        begin = {"path": str(self._path.resolve()), "config": self._config, "steps_done": steps_done}
        for name in self._names:
            feeder = Feeder(name, [{"begin": begin}, *history])
            self._feeders.append(feeder)
            feeder.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        self._put({"row": row})

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """A row of evals.jsonl."""
        self._put({"evaluation": row})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """What summary.json holds; goes out when the run has ended."""
        self._summary = summary

    def _put(self, message: Message) -> None:
        for feeder in self._feeders:
            feeder.put(message)
        self._tell()

    def _tell(self) -> None:
        """Say once of each tracker that has failed since, and let go of it."""
        for feeder in [feeder for feeder in self._feeders if feeder.failure is not None]:
            self._feeders.remove(feeder)
            self._say(
                f"tracker {feeder.tracker} is off: {feeder.failure}. The run goes on; everything is in "
                f"{self._path / 'metrics.jsonl'}, and a resumed run brings the tracker up to date."
            )

    def _close(self, status: str) -> None:
        """End the trackers within FLUSH_S. However this ends (a second Ctrl-C), none of their processes is left."""
        feeders = list(self._feeders)
        until = time.monotonic() + FLUSH_S
        try:
            self._put({"finish": {"status": status, "summary": self._summary}})
            for feeder in feeders:
                feeder.join(max(0.0, min(until, time.monotonic() + SILENT_S) - time.monotonic()))
            if waiting := [feeder.tracker for feeder in feeders if feeder.is_alive()]:
                self._say(f"waiting up to {FLUSH_S:.0f} s for {', '.join(waiting)} (Ctrl-C ends the wait)")
            for feeder in feeders:
                feeder.join(max(0.0, until - time.monotonic()))
                if feeder.is_alive():
                    feeder.fail(f"it was not done {FLUSH_S:.0f} s after the end")
        finally:
            for feeder in feeders:
                feeder.end()
        self._tell()
