"""An observer of a run: trackers, the report, or a class of a user's. The run knows only this form."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any


class Observer:
    """The methods do nothing here; a subclass overrides those that it needs. It wraps the run as a context manager."""

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The end of the run: `error` is None, or the reason why it stopped."""

    def open(self, steps_done: int) -> None:
        """The start of training, after a resumed run has read its checkpoint of `steps_done` steps."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl, after it was written."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """A row of evals.jsonl, after it was written."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The content of summary.json, after it was written."""
