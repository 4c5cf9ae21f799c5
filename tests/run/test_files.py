"""Files are complete or absent."""

import json
from pathlib import Path

import pytest

from topd.errors import ConfigError, RunStopped
from topd.run.files import append_line, parsed_lines, read_lines, replacing, write_json, write_text


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


def test_a_line_nested_without_end_is_damage_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": ' + "[" * 100_000 + "\n" + '{"b": 1}\n')
    damaged, fine = parsed_lines(tmp_path / "lines")
    assert isinstance(damaged, RecursionError)
    assert fine == {"b": 1}
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        read_lines(tmp_path / "lines")


def test_a_name_below_a_file_stops_the_run_resumably(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunStopped, match="could not be written"):
        write_text(tmp_path / "file" / "below", "y")
