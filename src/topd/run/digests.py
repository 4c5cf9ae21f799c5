"""digests.jsonl: digests of every file of a run folder as written, so that a reader detects damage on disk.

A digest is recorded before the file appears under its name, so that a kill in between leaves no file without one. A rewritten
file has several digests and may match any of them. In metrics.jsonl and evals.jsonl every line has a digest. A checkpoint's
digests are in its marker, so that they move with the folder.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from topd.errors import ConfigError, first_line
from topd.run.files import append_line, parsed_lines, text_of, write_text

NAME = "digests.jsonl"


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_folder(folder: Path, *, but: str = "") -> dict[str, str]:
    """Path within the folder -> SHA-256, for all its files except `but`, in the order of their names."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    names = [name for name in names if name != but]
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter
        return dict(zip(names, pool.map(lambda name: sha256(folder / name), names), strict=True))


def difference(written: Mapping[str, str], now: Mapping[str, str]) -> str:
    """First difference between two results of `of_folder`; "" if there is none."""
    for name in sorted(written.keys() | now.keys()):
        if name not in now:
            return f"{name} is missing"
        if name not in written:
            return f"{name} was added later"
        if written[name] != now[name]:
            return f"{name}: {_apart(now[name], [written[name]])}"
    return ""


class Digests:
    """The digests of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.lost = ""
        """Reason why digests are missing: files without one are not proven to be undamaged. "" if none is missing."""
        self._known: dict[str, set[str]] = {}
        self._size = -1
        self._read()

    def _read(self) -> bool:
        """Read new records; returns False if there are none. A run may still be writing to the folder."""
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            if size == self._size:
                return False
            self._size = size
            notes = list(parsed_lines(self.path))
        except OSError as error:
            self.lost = f"{NAME} cannot be read ({first_line(error)}): earlier files are not proven to be undamaged"
            return False
        whole = [
            note for note in notes if not isinstance(note, Exception) and note == _note(note.get("file"), note.get("sha256"))
        ]
        for note in whole:
            self._known.setdefault(note["file"], set()).add(note["sha256"])
        if not whole:
            reason = f"no line of {NAME} is valid" if self.path.exists() else f"there is no {NAME}"
            self.lost = f"{reason} (an older version wrote this folder, or it was lost): files are not proven to be undamaged"
        elif len(whole) < len(notes):
            self.lost = f"{NAME} has {len(notes) - len(whole)} damaged lines: their files are not proven to be undamaged"
        return True

    def knows(self, path: Path) -> bool:
        return self._name(path) in self._known

    def note(self, path: Path, written: Path) -> None:
        """Record the digests of `written`, a file or folder that will be renamed to `path`."""
        if written.is_file():
            self._add(self._name(path), sha256(written))
            return
        for name, digest in of_folder(written).items():
            self._add(self._name(path / name), digest)

    def note_line(self, path: Path, value: Mapping[str, Any]) -> None:
        """Record the digest of a line before `append_line` adds it."""
        self._add(self._name(path), _of_line(value))

    def difference(self, path: Path) -> str:
        """Difference between a file and its digests; "" if there is none, no such file, or no digest of it."""
        known = self._known.get(self._name(path))
        if not known or not path.is_file():
            return ""
        now = sha256(path)
        return "" if now in known or (self._read() and now in known) else _apart(now, sorted(known))

    def lines(self, path: Path) -> Iterator[dict[str, Any] | Exception]:
        """Like `parsed_lines`, with an error also in place of a line whose digest is not recorded."""
        known = self._known.get(self._name(path))
        for line in parsed_lines(path):
            if isinstance(line, Exception) or not known or self.lost:
                yield line
                continue
            is_written = _of_line(line) in known or (self._read() and _of_line(line) in known)
            yield line if is_written else ValueError("the run did not write this line")

    def begin(self, *logs: Path) -> None:
        """Rewrite the file without damaged lines. If digests were lost, the present lines of `logs` are recorded."""
        for log in logs if self.lost else []:
            with contextlib.suppress(OSError):  # the reader of the log reports it
                rows = [line for line in parsed_lines(log) if not isinstance(line, Exception)]
                self._known.setdefault(self._name(log), set()).update(map(_of_line, rows))
        notes = [_note(name, digest) for name, known in sorted(self._known.items()) for digest in sorted(known)]
        write_text(self.path, "".join(text_of(note) + "\n" for note in notes))
        self.lost = ""

    def check_folder(self, folder: Path, where: str) -> None:
        """Raise ConfigError if a file of a recorded folder differs from its digest."""
        for file in sorted(folder.rglob("*")) if self._known else ():
            if reason := self.difference(file):
                raise ConfigError(
                    f"{where} is damaged: {file.name}: {reason}. Replace it by an undamaged copy; or delete {folder} and "
                    "repeat the training command with --run.resume true, which regenerates it."
                )

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _add(self, name: str, digest: str) -> None:
        known = self._known.setdefault(name, set())
        if digest not in known:
            append_line(self.path, _note(name, digest))
            known.add(digest)


def _note(name: object, digest: object) -> dict[str, Any]:
    """One line of digests.jsonl, with a check sum of itself."""
    return {"file": name, "sha256": digest, "check": hashlib.sha256(f"{name} {digest}".encode()).hexdigest()[:8]}


def _of_line(value: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(text_of(value).encode()).hexdigest()
    except ValueError:  # a NaN, which is never written
        return ""


def _apart(now: str, written: list[str]) -> str:
    expected = " or ".join(digest[:12] for digest in written)
    return f"it has changed since it was written (its SHA-256 begins with {now[:12]}, not with {expected})"
