"""What every tracker's module holds: a class `Run` of this form. It runs in a process of its own, and may raise anything."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topd.trackers.values import Table


@dataclass(frozen=True, slots=True)
class Start:
    """What a tracker run begins with, or goes on from."""

    folder: Path
    """The run folder's trackers/NAME, for what is kept on this machine."""
    name: str
    """Name of the run folder."""
    config: Mapping[str, Any]
    """The resolved configuration, nested."""
    environment: Mapping[str, Any]
    """What environment.json holds."""
    run_id: str | None
    """The tracker run to go on with; None for a new one."""
    steps_done: int
    """Steps that the training run has behind it."""
    calls: int
    """Times that `log` and `summarise` have been called for this tracker run."""


class Tracker(ABC):
    """One run in a tracker."""

    REWINDS = False
    """Whether steps after `Start.steps_done` are forgotten when a run goes on, and must be given again."""

    run_id: str
    """What a resumed run finds this one by."""

    by_hand: str | None = None
    """A command that sends what is kept on this machine, for a tracker that sends later than it answers."""

    @staticmethod
    @abstractmethod
    def where(folder: Path) -> str:
        """The store that the user's environment asks for, or the one in the folder."""

    @abstractmethod
    def __init__(self, start: Start) -> None: ...

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    @abstractmethod
    def summarise(self, step: int, numbers: Mapping[str, float], table: Table) -> None:
        """The end of a run that was not stopped."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Write everything out. The status is finished, stopped (can be resumed) or failed."""
