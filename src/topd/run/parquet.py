"""Parquet files, read in one way: by this thread alone, from a native file.

Arrow's own threads outlive the reading. One that lets go of a buffer that Python owns while the interpreter ends aborts the
process. So no thread is asked (pre_buffer and use_threads would), and no buffer is Python's (those of a file object are).
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError, OverflowError)
"""What a table raises that is damaged, or is of another shape."""


def read(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """All columns, or those of `schema` in its types. Raises one of UNREADABLE for what is no file, damaged or lacks one."""
    if not path.is_file():
        raise OSError(f"{path.name} is no file")
    with pa.OSFile(os.fsencode(path)) as file, pq.ParquetFile(file, pre_buffer=False) as parquet:
        there = parquet.schema_arrow.names
        if schema is None:
            return parquet.read(use_threads=False)
        if lacking := [name for name in schema.names if name not in there]:
            raise ValueError(f"there is no column {lacking[0]}")
        return parquet.read(schema.names, use_threads=False).select(schema.names).cast(schema)
