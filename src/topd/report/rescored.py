"""What `topd rescore` left in a run folder, as a table and figures for the report."""

from collections.abc import Iterator
from typing import Any

from topd.report.stored import StoredRun


def rescored(run: StoredRun) -> Iterator[dict[str, Any]]:
    """One entry per file: title, table and charts."""
    yield from ()
