"""Columns of the parquet files of a step, and their one reader, for a resumed run and for the report. Needs no torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from topd.evidence import EVIDENCE
from topd.run import parquet
from topd.run.parquet import Unreadable

_NUMBERS = pa.list_(pa.float32())
ROLLOUTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("policy_version", pa.int64()),
        ("completion", pa.string()),
        ("completion_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("grade", pa.float32()),
        ("num_grader_errors", pa.int32()),
        ("rollout_logprobs", _NUMBERS),
        ("behaviour_logprobs", _NUMBERS),
        ("old_logprobs", _NUMBERS),
        ("teacher_logprobs", _NUMBERS),
        ("token_rewards", _NUMBERS),
        ("returns", _NUMBERS),
        ("advantages", _NUMBERS),
    ]
)
"""rollouts/step_*.parquet: one row a completion."""

_TYPES = {"token": _NUMBERS, "token k": pa.list_(_NUMBERS)}
MORE = pa.schema(
    [
        (name, pa.list_(pa.list_(pa.int32())) if stream.integer else _TYPES[stream.axes])
        for name, stream in EVIDENCE.items()
        if stream.axes != "rollout" and name not in ROLLOUTS.names
    ]
)
"""Streams of the table of evidence that are stored where an algorithm asks for them."""

UPDATES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("rollout", pa.int32()),
        ("update", pa.int64()),
        ("importance_ratios", _NUMBERS),
        ("clipped", pa.list_(pa.bool_())),
    ]
)
"""updates/step_*.parquet: one row for every time that a completion was trained on."""

FORMER = {"reward": "grade"}
"""Names of columns in earlier versions."""


def read(
    path: Path, schema: pa.Schema, *, optional: pa.Schema | None = None, per: str = "completion_ids"
) -> dict[str, list[Any]]:
    """Column -> its cells, one per row: of a list an array, [token, k] of a list of lists.

    A stream that is null in all rows is absent, as the run did not store it. Raises Unreadable for any other null
    (`answer` may be one), and for a list of another length than the row's `per`.
    """
    table = parquet.read(path, schema, optional=optional, former=FORMER)
    columns = {name: _cells(name, table[name]) for name in table.column_names}
    for name in {"teacher_logprobs", *(optional.names if optional else ())} & columns.keys():
        if len(table) and table[name].null_count == len(table):
            del columns[name]
    for name, cells in columns.items():
        for row, (cell, tokens) in enumerate(zip(cells, columns[per], strict=True)):
            if cell is None and tokens is not None and not len(tokens) and pa.types.is_list(table.schema.field(name).type):
                cells[row] = tokens.astype(np.float32)
            elif cell is None and name != "answer":
                raise Unreadable(f"{name} is null in row {row}")
            if isinstance(cell, np.ndarray) and name != "prompt_ids" and tokens is not None and len(cell) != len(tokens):
                raise Unreadable(f"{name} has {len(cell)} numbers for {len(tokens)} tokens in row {row}")
    return columns


def _cells(name: str, column: pa.ChunkedArray) -> list[Any]:
    array = column.combine_chunks()
    if not pa.types.is_list(array.type):
        return list(array.to_pylist())
    inner, shape = array.values, [-1]
    if pa.types.is_list(inner.type) and not inner.null_count:
        widths = set(np.diff(inner.offsets.to_numpy()).tolist())
        if len(widths) != 1:
            raise Unreadable(f"its lists have {sorted(widths)} entries ({name})")
        inner, shape = inner.values, [-1, widths.pop()]
    if inner.null_count:
        raise Unreadable(f"{inner.null_count} numbers are null in {name}")
    values = inner.to_numpy(zero_copy_only=False).copy().reshape(shape)
    starts, valid = array.offsets.to_numpy().tolist(), array.is_valid().to_pylist()
    return [values[a:b] if ok else None for ok, a, b in zip(valid, starts[:-1], starts[1:], strict=True)]
