"""vocabulary.parquet: what every token id of a run stands for, as bytes, so that its rollouts can be shown without the model."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from topd.run.files import replacing

SCHEMA = pa.schema([("token_id", pa.int32()), ("text", pa.binary()), ("special", pa.bool_())])


def write(path: Path, entries: Iterable[tuple[int, bytes, bool]]) -> None:
    """Once a run: a file that is there is left alone. `entries`: as models/vocabulary.py gives them."""
    if path.is_file():
        return
    columns = list(zip(*entries, strict=True)) or [(), (), ()]
    with replacing(path) as partial:
        pq.write_table(pa.table(columns, schema=SCHEMA), partial, compression="zstd")


def read(path: Path) -> dict[int, tuple[bytes, bool]]:
    """Token id -> (bytes, special). Raises OSError or pyarrow's ArrowException for a file that is not there or damaged."""
    table = pq.read_table(path, schema=SCHEMA)
    if any(table[name].null_count for name in SCHEMA.names):  # a column that is not there is read as nulls
        raise pa.ArrowInvalid("some entries are empty")
    columns = (table[name].to_pylist() for name in SCHEMA.names)
    return {token_id: (text, special) for token_id, text, special in zip(*columns, strict=True)}
