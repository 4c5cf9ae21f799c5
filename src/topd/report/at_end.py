"""report.html at the end of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from topd.errors import first_line
from topd.run.observer import Observer


class ReportAtEnd(Observer):
    """Writes the report of a run that is done. A finished run does not fail for its picture."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say

    def finish(self, summary: Mapping[str, Any]) -> None:
        from topd.report import page  # plotly is loaded for this alone

        try:
            page.write([self.path])
        except Exception as error:  # whatever it is: `topd report` shows it again, and nothing is lost
            self.say(f"no report was written ({first_line(error)}); `topd report {self.path}` tries again")
