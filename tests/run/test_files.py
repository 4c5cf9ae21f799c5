"""Files are complete or absent."""

import json
from pathlib import Path

import pytest

from topd.errors import RunStopped
from topd.run.files import append_line, read_lines, replacing, write_json


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError, match="boom"), replacing(path) as partial:
        partial.write_text("half")
        raise RuntimeError("boom")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_refusing_disk_stops_the_run_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"could not be written.*--run.resume true"), replacing(tmp_path / "x") as partial:
        partial.write_text("half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_half_a_line_at_the_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"step": 1})
    append_line(path, {"step": 2})
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_numbers_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(tmp_path / "rows.jsonl", {"loss": float("nan")})
