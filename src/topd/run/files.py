"""Files that are either complete or absent: written beside, flushed to disk, renamed."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from topd.errors import ConfigError, RunStopped

PARTIAL = ".partial"
"""Suffix of what is not complete yet. Nothing ever reads such a file; the next writer removes it."""


Note = Callable[[Path, Path], None]
"""Called with a path and with what is about to appear there (run/digests.py)."""


@contextmanager
def replacing(path: Path, note: Note | None = None) -> Iterator[Path]:
    """A path to write to, beside `path`; renamed to it when the block ends well, removed otherwise.

    Raises RunStopped if the disk refuses; what was at `path` before is untouched then.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        yield partial
        if note is not None:
            note(path, partial)
        flush(partial)
        if path.is_dir():  # a folder cannot be replaced by renaming: the old one steps aside first
            old = path.with_name(path.name + ".old" + PARTIAL)
            remove(old)
            os.replace(path, old)
        os.replace(partial, path)
        remove(path.with_name(path.name + ".old" + PARTIAL))
        _flush_names(path.parent)
    except (OSError, SafetensorError) as error:
        raise RunStopped(
            f"{path} could not be written: {error}. What was saved before is still valid. Free some space (or fix the disk), "
            "then run the same command with --run.resume true."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # what cannot be written cannot be removed; the first reason is the one to tell
            remove(partial)


def write_text(path: Path, text: str, note: Note | None = None) -> None:
    with replacing(path, note) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], note: Note | None = None) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", note)


def text_of(value: Mapping[str, Any]) -> str:
    """A row as `append_line` writes it; a row that was read gives the same text."""
    return json.dumps(value, allow_nan=False)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object as a line at the end, in one write. A reader ignores a last line without its newline."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text_of(value) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunStopped(
            f"{path} could not be written: {error}. Free some space, then run the same command with --run.resume true."
        ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file made by `append_line`; empty if there is none. Raises ConfigError for a damaged one."""
    return whole(path, parsed_lines(path))


def whole(path: Path, lines: Iterable[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    """The parsed lines of `path`, if none is an error. Raises ConfigError naming the first that is."""
    rows = []
    try:
        for number, line in enumerate(lines, 1):
            if isinstance(line, Exception):
                raise ConfigError(f"{path}, line {number} is damaged ({line}). Delete that line to go on.") from line
            rows.append(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Put the file back that was there.") from error
    return rows


def parsed_lines(path: Path) -> Iterator[dict[str, Any] | Exception]:
    """The same, with the error in the place of a damaged line. Raises OSError for what is there and cannot be read."""
    if not path.exists():
        return
    if not path.is_file():
        raise OSError(f"{path.name} is no file")
    complete, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    for line in complete.split("\n") if complete else []:
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            yield error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def flush(path: Path) -> None:
    """Force a file, or all files of a folder, to disk."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _flush_names(folder: Path) -> None:
    """Force a rename in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: [1, 2, 3, 7] -> "1 to 3, 7"."""
    parts: list[list[int]] = []
    for each in numbers:
        if parts and each == parts[-1][-1] + 1:
            parts[-1].append(each)
        else:
            parts.append([each])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
