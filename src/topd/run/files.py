"""Files that are either complete or absent: written under a temporary name, flushed to disk, renamed."""

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
"""Suffix of incomplete files. They are never read; the next writer removes them."""


Note = Callable[[Path, Path], None]
"""Callback with a path and the partial file or folder that will be renamed to it (run/digests.py)."""


@contextmanager
def replacing(path: Path, note: Note | None = None) -> Iterator[Path]:
    """Yield a path that is renamed to `path` when the block succeeds. Raises RunStopped if not; an older `path` stays."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        yield partial
        if note is not None:
            note(path, partial)
        flush(partial)
        if path.is_dir():  # renaming cannot replace a folder: rename the old one first
            old = path.with_name(path.name + ".old" + PARTIAL)
            remove(old)
            os.replace(path, old)
        os.replace(partial, path)
        remove(path.with_name(path.name + ".old" + PARTIAL))
        _flush_names(path.parent)
    except (OSError, SafetensorError) as error:
        raise RunStopped(
            f"{path} could not be written: {error}. Everything saved before is still valid. Free some space (or fix the disk), "
            "then run the same command with --run.resume true."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # report the first error, not that of the removal
            remove(partial)


def write_text(path: Path, text: str, note: Note | None = None) -> None:
    with replacing(path, note) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], note: Note | None = None) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", note)


def text_of(value: Mapping[str, Any]) -> str:
    """JSON of a row as `append_line` writes it; a row that was read gives the same text."""
    return json.dumps(value, allow_nan=False)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, in one write. Readers ignore a last line without its newline."""
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
    """Complete lines of a file made by `append_line`; empty without a file. Raises ConfigError for a damaged line."""
    return whole(path, parsed_lines(path))


def whole(path: Path, lines: Iterable[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    """Parsed lines of `path`. Raises ConfigError naming the first damaged line."""
    rows = []
    try:
        for number, line in enumerate(lines, 1):
            if isinstance(line, Exception):
                raise ConfigError(f"{path}, line {number} is damaged ({line}). Delete that line to continue.") from line
            rows.append(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Restore the file.") from error
    return rows


def parsed_lines(path: Path) -> Iterator[dict[str, Any] | Exception]:
    """Like `read_lines`, with an error in place of a damaged line. Raises OSError for an unreadable file."""
    if not path.exists():
        return
    if not path.is_file():
        raise OSError(f"{path.name} is not a file")
    complete, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    for line in complete.split("\n") if complete else []:
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            yield error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    table: dict[str, Any] = {}
    for key, value in tree.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return table


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
    """Remove a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: [1, 2, 3, 7] -> "1 to 3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)
