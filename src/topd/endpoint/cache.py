"""Scores in one SQLite file, so that a run resumed after a crash does not repeat requests that were already answered."""

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topd.errors import RunStopped
from topd.models.logprobs import TokenGroup

KEEP_STEPS = 2
"""Entries are needed until the step's rollouts are stored; one step more covers rollouts sampled ahead."""

SEAL = 8
"""Bytes of the digest of an entry."""


class ScoreCache:
    """Log-probs by (identity, prompt, completion). Several teachers and threads may share one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._open():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            # WAL otherwise needs shared memory, which network folders lack
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, generation INTEGER, logprobs BLOB)")
            self._database.execute("UPDATE scores SET generation = 0")  # a damaged file may hold any generation
            self.generation = 0

    def get(self, identity: str, group: TokenGroup) -> list[Tensor | None]:
        """Stored log-probs of a group's completions, in order; None for those not stored."""
        with self._open():
            return [self._get(key, len(c)) for key, c in zip(_keys(identity, group), group.completions, strict=True)]

    def _get(self, key: bytes, length: int) -> Tensor | None:
        is_blob = "typeof(logprobs) = 'blob'"  # a damaged file may hold other types
        row = self._database.execute(f"SELECT logprobs FROM scores WHERE key = ? AND {is_blob}", (key,)).fetchone()
        if row is None or len(row[0]) != 4 * length + SEAL:  # an older version stored no digest
            return None
        numbers, seal = row[0][:-SEAL], row[0][-SEAL:]
        if seal != _seal(key, numbers):
            return None  # damaged: request it again
        return torch.from_numpy(np.frombuffer(numbers, dtype="<f4").copy())

    def put(self, identity: str, group: TokenGroup, logprobs: Sequence[Tensor]) -> None:
        stored = [part.numpy().astype("<f4").tobytes() for part in logprobs]
        pairs = zip(_keys(identity, group), stored, strict=True)
        rows = [(key, self.generation, numbers + _seal(key, numbers)) for key, numbers in pairs]
        with self._open():
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows)
            self._database.execute("COMMIT")

    def step_done(self) -> None:
        """Delete the scores of steps whose rollouts are stored."""
        with self._open():
            self._database.execute("DELETE FROM scores WHERE generation <= ?", (self.generation - KEEP_STEPS + 1,))
        self.generation += 1

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Lock the database; SQLite's failures (a full disk, a damaged file) become RunStopped."""
        try:
            with self._lock:
                yield
        except (OSError, sqlite3.Error) as error:
            raise RunStopped(
                f"{self.path} cannot be used: {error}. Free some space, or delete that file (its scores are then requested "
                "again), and run the same command with --run.resume true."
            ) from error


def _seal(key: bytes, numbers: bytes) -> bytes:
    """Digest of an entry, stored after its numbers."""
    return hashlib.sha256(key + numbers).digest()[:SEAL]


def _keys(identity: str, group: TokenGroup) -> list[bytes]:
    prompt = np.asarray(group.prompt_ids, dtype="<i8").tobytes()
    start = hashlib.sha256(repr((identity, len(group.prompt_ids))).encode() + prompt)
    keys = []
    for completion in group.completions:
        digest = start.copy()
        digest.update(np.asarray(completion, dtype="<i8").tobytes())
        keys.append(digest.digest())
    return keys
