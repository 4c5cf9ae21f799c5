"""Reader of parquet files: in the calling thread only, from a native file.

Arrow's threads outlive the read. If one frees a buffer owned by Python while the interpreter exits, the process aborts. So no
threads are used (pre_buffer and use_threads would), and no buffers of Python (a file object would).
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError, OverflowError)
"""Exceptions raised by a table that is damaged or has another schema."""


def read(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """All columns, or those of `schema` in its types. Raises one of UNREADABLE if the file or a column is missing or damaged."""
    if not path.is_file():
        raise OSError(f"{path.name} is not a file")
    with pa.OSFile(os.fsencode(path)) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
        if schema is None:
            return parquet.read(use_threads=False)
        if lacking := [name for name in schema.names if name not in parquet.schema_arrow.names]:
            raise ValueError(f"there is no column {lacking[0]}")
        return parquet.read(schema.names, use_threads=False).select(schema.names).cast(schema)
