"""Stored rollouts of one step: groups of completions with one number per token and stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from topd.run.columns import ROLLOUTS, UPDATES, read

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Seen = Mapping[tuple[str, int], Mapping[str, Any]]
"""(prompt id, rollout) -> row of the last update that used it."""

_ROW = pa.schema(
    [
        ROLLOUTS.field(name)
        for name in (
            *("prompt_id", "domain", "prompt", "answer", "policy_version"),
            *("completion", "completion_ids", "finish_reason", "grade"),
        )
    ]
)
_STREAMS = ("behaviour_logprob", "teacher_logprob", "token_reward", "return", "advantage")
"""Each is a column, whose name is the plural."""


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
    def rollouts(self) -> list[StoredRollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)


def read_step(path: Path, step: int, seen: Seen) -> StoredStep:
    """Raises parquet.Unreadable, as `read_updates` does."""
    columns = read(path, _ROW, optional=pa.schema([ROLLOUTS.field(f"{name}s") for name in _STREAMS]))
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for cells in zip(*columns.values(), strict=True):
        row = dict(zip(columns, cells, strict=True))
        rows_of.setdefault(row["prompt_id"], []).append(row)
    groups = []
    for index, (prompt_id, rows) in enumerate(rows_of.items()):
        rollouts = tuple(_rollout(i, row, seen.get((prompt_id, i))) for i, row in enumerate(rows))
        fields = {name: rows[0][name] for name in ("prompt_id", "domain", "prompt", "answer", "policy_version")}
        groups.append(StoredGroup(index=index, rollouts=rollouts, **fields))
    return StoredStep(step=step, groups=tuple(groups))


def read_updates(path: Path) -> Seen:
    """Empty if there is no such file yet."""
    if not path.exists():
        return {}
    columns = read(path, UPDATES, per="importance_ratios")
    rows = (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    return {(row["prompt_id"], row["rollout"]): row for row in rows}


def _rollout(index: int, row: Mapping[str, Any], update: Mapping[str, Any] | None) -> StoredRollout:
    streams = {name: row[f"{name}s"] for name in _STREAMS if f"{name}s" in row}
    if streams.keys() >= {"teacher_logprob", "behaviour_logprob"}:
        with np.errstate(invalid="ignore"):
            streams["log_ratio"] = streams["teacher_logprob"] - streams["behaviour_logprob"]
    fits = update is not None and len(update["importance_ratios"]) == len(row["completion_ids"])
    if update is not None and fits:
        streams |= {"importance_ratio": update["importance_ratios"], "clipped": update["clipped"].astype(np.float32)}
    return StoredRollout(
        index=index,
        text=row["completion"],
        token_ids=tuple(row["completion_ids"].tolist()),
        finish_reason=row["finish_reason"],
        grade=row["grade"],
        streams=streams,
        update=update["update"] if update is not None and fits else None,
    )
