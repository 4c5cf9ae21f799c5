"""Reader of parquet files: in the calling thread only, from a native file.

Arrow's threads outlive the read. If one frees a buffer owned by Python while the interpreter exits, the process aborts. So no
threads are used (pre_buffer and use_threads would), and no buffers of Python (a file object would).
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from topd.errors import first_line


class Unreadable(ValueError):
    """A parquet file that is missing, damaged, or of another schema. The message is one line."""


def read(
    path: Path,
    schema: pa.Schema | None = None,
    *,
    optional: pa.Schema | None = None,
    former: Mapping[str, str] | None = None,
) -> pa.Table:
    """All columns, or those of `schema` (and those of `optional` that are there) in their types.

    `former`: name of a column in earlier versions -> its name now. Raises Unreadable.
    """
    try:
        if not path.is_file():
            raise OSError(f"{path.name} is not a file")
        with pa.OSFile(os.fsencode(path)) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
            table = parquet.read(use_threads=False)
        table = table.rename_columns([(former or {}).get(name, name) for name in table.column_names])
        if schema is None:
            return table
        if lacking := [name for name in schema.names if name not in table.column_names]:
            raise ValueError(f"there is no column {lacking[0]}")
        schema = pa.schema([*schema, *(field for field in optional or () if field.name in table.column_names)])
        return table.select(schema.names).cast(schema)
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise Unreadable(first_line(error)) from error
