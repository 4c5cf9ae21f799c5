"""The rollouts of one step as they are stored: groups of completions with one number per token and stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from topd.run import parquet
from topd.run.columns import FORMER

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Seen = Mapping[tuple[str, int], Mapping[str, Any]]
"""(prompt id, rollout) -> what the last update that used it saw."""

_STREAMS = ("behaviour_logprob", "teacher_logprob", "token_reward", "return", "advantage")
"""Each is a column, whose name is the plural."""

_ROW = ("prompt_id", "domain", "prompt", "answer", "policy_version", "completion", "finish_reason", "grade")
_MAY_BE_NULL = ("answer",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One completion. Every stream holds one number per token; what the run did not store is absent.

    Streams: behaviour_logprob, teacher_logprob, log_ratio, token_reward, return, advantage (nats, but the last) as the step's
    credit saw them; importance_ratio and clipped (0 or 1) as the last update that used the completion saw them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    grade: float
    streams: Mapping[str, Numbers]
    update: int | None = None
    """Which update of the run that was, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """All completions of one prompt; `index` counts the step's prompts from 0."""

    index: int
    prompt_id: str
    domain: str
    prompt: str
    answer: str | None
    policy_version: int
    rollouts: tuple[StoredRollout, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    step: int
    groups: tuple[StoredGroup, ...]

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


def read_step(path: Path, step: int, seen: Seen) -> StoredStep:
    """Raises one of parquet.UNREADABLE for a file that is not there, damaged, or of another shape."""
    return StoredStep(step=step, groups=tuple(_groups(parquet.read(path, former=FORMER), seen)))


def read_updates(path: Path) -> Seen:
    """Empty if there is no such file yet. Raises one of parquet.UNREADABLE as `read_step` does."""
    if not path.exists():
        return {}
    table = parquet.read(path)
    columns = {name: _cells(table[name]) for name in table.column_names}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return {(row["prompt_id"], row["rollout"]): _update(row) for row in rows}


def _groups(table: pa.Table, updates: Mapping[tuple[str, int], Mapping[str, Any]]) -> Iterator[StoredGroup]:
    columns = {name: table[name].to_pylist() for name in _ROW}
    if absent := [name for name in _ROW if name not in _MAY_BE_NULL and None in columns[name]]:
        raise ValueError(f"{absent[0]} is null")
    ids = _cells(table["completion_ids"])
    streams = {name: _cells(table[f"{name}s"]) for name in _STREAMS if f"{name}s" in table.column_names}
    for name, cells in {"completion_ids": ids, **streams}.items():
        nulls = sum(cell is None and (tokens is None or len(tokens) > 0) for cell, tokens in zip(cells, ids, strict=True))
        if nulls and (name == "completion_ids" or any(cell is not None for cell in cells)):
            raise ValueError(f"{name} is null in {nulls} of {len(cells)} rows")
    rows_of: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(columns["prompt_id"]):
        rows_of.setdefault(prompt_id, []).append(row)
    for index, (prompt_id, rows) in enumerate(rows_of.items()):
        first = rows[0]
        rollouts = [
            _rollout(
                i, {name: cells[row] for name, cells in columns.items()}, ids[row], _of(streams, row), updates.get((prompt_id, i))
            )
            for i, row in enumerate(rows)
        ]
        yield StoredGroup(
            index=index,
            prompt_id=prompt_id,
            domain=columns["domain"][first],
            prompt=columns["prompt"][first],
            answer=columns["answer"][first],
            policy_version=columns["policy_version"][first],
            rollouts=tuple(rollouts),
        )


def _update(row: Mapping[str, Any]) -> dict[str, Any]:
    """What an update saw of one completion. Raises if some of it is not there."""
    ratios, clipped = row["importance_ratios"], row["clipped"].astype(np.float32)
    if len(ratios) != len(clipped):
        raise ValueError(f"{len(ratios)} importance ratios, but {len(clipped)} tokens")
    return {"update": int(row["update"]), "importance_ratio": ratios, "clipped": clipped}


def _of(streams: Mapping[str, list[Any]], row: int) -> dict[str, Numbers]:
    return {name: cells[row] for name, cells in streams.items() if cells[row] is not None}


def _rollout(
    index: int,
    row: Mapping[str, Any],
    ids: np.ndarray[Any, np.dtype[np.int32]],
    streams: dict[str, Numbers],
    update: Mapping[str, Any] | None,
) -> StoredRollout:
    if streams.keys() >= {"teacher_logprob", "behaviour_logprob"}:
        with np.errstate(invalid="ignore"):
            streams["log_ratio"] = streams["teacher_logprob"] - streams["behaviour_logprob"]
    for name, values in streams.items():
        if len(values) != len(ids):
            raise ValueError(f"{name} has {len(values)} numbers for {len(ids)} tokens")
    if update is not None and len(update["importance_ratio"]) == len(ids):
        streams |= {name: update[name] for name in ("importance_ratio", "clipped")}
    else:
        update = None
    return StoredRollout(
        index=index,
        text=row["completion"],
        token_ids=tuple(ids.tolist()),
        finish_reason=row["finish_reason"],
        grade=row["grade"],
        streams=streams,
        update=update["update"] if update is not None else None,
    )


def _cells(column: pa.ChunkedArray) -> list[Any]:
    """A column's cells: one array per list, sharing one buffer; plain values otherwise; None where it is null."""
    array = column.combine_chunks()
    if not pa.types.is_list(array.type):
        return array.to_pylist()
    if array.values.null_count:
        raise ValueError(f"{array.values.null_count} numbers are null")
    values = array.values.to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy().tolist()
    valid = array.is_valid().to_pylist()
    return [values[a:b] if ok else None for ok, a, b in zip(valid, starts[:-1], starts[1:], strict=True)]
