"""vocabulary.parquet: the bytes of every token id of a run, so that its rollouts can be displayed without the model."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from topd.errors import ConfigError, first_line
from topd.run import parquet
from topd.run.files import Note, replacing

SCHEMA = pa.schema([("token_id", pa.int32()), ("text", pa.binary()), ("special", pa.bool_())])


def write(path: Path, entries: Iterable[tuple[int, bytes, bool]], note: Note | None = None) -> None:
    """Write the file once per run. `entries`: from models/vocabulary.py. Raises ConfigError if the file exists with others."""
    columns = list(zip(*entries, strict=True)) or [(), (), ()]
    table = pa.table(columns, schema=SCHEMA)
    if path.is_file():
        _check(path, table)
        return
    with replacing(path, note) as partial:
        pq.write_table(table, partial, compression="zstd")


def _check(path: Path, table: pa.Table) -> None:
    try:
        stored = parquet.read(path, SCHEMA)
        same = stored.equals(table)
        reason = f"it holds {len(stored)} entries, the student's tokenizer {len(table)}" if len(stored) != len(table) else ""
    except parquet.Unreadable as error:
        same, reason = False, first_line(error).rstrip(". ")
    if not same:
        raise ConfigError(
            f"{path} is damaged, or the student's tokenizer has changed: {reason or 'their entries differ'}. If the tokenizer is "
            "unchanged since the run began, delete that file: it is regenerated."
        )


def read(path: Path) -> dict[int, tuple[bytes, bool]]:
    """Token id -> (bytes, special). Raises parquet.Unreadable for a missing or damaged file."""
    table = parquet.read(path, SCHEMA)
    if any(table[name].null_count for name in SCHEMA.names):
        raise parquet.Unreadable("some entries are empty")
    columns = (table[name].to_pylist() for name in SCHEMA.names)
    return {token_id: (text, special) for token_id, text, special in zip(*columns, strict=True)}
