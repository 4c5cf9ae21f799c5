"""Rollouts on disk: one parquet file a step, one row a completion, every per-token stream beside it.

A step whose file is there is not sampled or scored again: a resumed run reads it. What its updates saw follows in a second file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from topd.errors import ConfigError, first_line
from topd.evidence import EVIDENCE
from topd.ragged import Ragged
from topd.run.columns import MORE, ROLLOUTS, UPDATES
from topd.run.columns import read as read_columns
from topd.run.files import Note, replacing
from topd.run.parquet import Unreadable
from topd.types import Credit, Prompt, Rollout, RolloutGroup, ScoredGroup, StepReport, TrainBatch

_CREDIT = ("token_rewards", "returns", "advantages")


def write(path: Path, groups: Sequence[ScoredGroup], evidence: Ragged, credit: Credit, note: Note | None = None) -> None:
    """Store a step. `num_grader_errors` counts the whole group and stands in each of its rows."""
    credited = evidence.adding(**{name: getattr(credit, name) for name in _CREDIT})
    streams = {name: iter(credited.by_rollout(name)) for name in credited.tokens}
    rows = [
        {**_row(scored, i), **{name: _cell(next(parts)) for name, parts in streams.items()}}
        for scored in groups
        for i in range(len(scored.group.rollouts))
    ]
    schema = pa.schema([*ROLLOUTS, *(field for field in MORE if field.name in evidence)])
    with replacing(path, note) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), partial, compression="zstd")


def write_updates(
    path: Path, batches: Sequence[TrainBatch], reports: StepReport, *, policy_version: int, note: Note | None = None
) -> None:
    """Data of the updates of a step, one row per completion and update, in the order of the updates.

    `policy_version`: updates made before the first of these. `update` counts from 1 over the whole run.
    """
    rows = []
    for number, (batch, report) in enumerate(zip(batches, reports, strict=True), policy_version + 1):
        seen = batch.streams.adding(ratios=report.log_importance.exp(), clipped=report.clipped)
        streams = zip(seen.by_rollout("ratios"), seen.by_rollout("clipped"), strict=True)
        for group in batch.groups:
            for i in range(len(group.rollouts)):
                ratios, clipped = next(streams)
                row = {"prompt_id": group.prompt.id, "rollout": i, "update": number}
                rows.append({**row, "importance_ratios": ratios.numpy(), "clipped": clipped.numpy()})
    with replacing(path, note) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=UPDATES), partial, compression="zstd")


def read(path: Path, prompts: Sequence[Prompt], reason: str = "") -> list[ScoredGroup]:
    """The groups of a step, in the order of its prompts, without those that were dropped. They carry the numbers as written.

    `reason`: why the file is known to be damaged, if it is. Raises ConfigError then, and for what no run writes.
    """
    try:
        if reason:
            raise Unreadable(reason)
        columns = _tensors(read_columns(path, ROLLOUTS, optional=MORE))
    except Unreadable as error:
        raise ConfigError(
            f"{path} is damaged: {first_line(error).rstrip('. ')}. Delete it: the step is then sampled again."
        ) from error
    rows_of: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(columns["prompt_id"]):
        rows_of.setdefault(prompt_id, []).append(row)
    of_step = {prompt.id: list(prompt.token_ids) for prompt in prompts}
    asked = zip(columns["prompt_id"], columns["prompt_ids"], strict=True)
    if not rows_of or any(of_step.get(prompt_id) != token_ids.tolist() for prompt_id, token_ids in asked):
        raise ConfigError(f"{path} does not hold this step's prompts. Delete it: the step is then sampled again.")
    return [_group(prompt, columns, rows_of[prompt.id]) for prompt in prompts if prompt.id in rows_of]


def _cell(stream: torch.Tensor) -> Any:
    """A completion's stream as Arrow takes it."""
    return stream.numpy() if stream.ndim == 1 else list(stream.numpy())


def _stream(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)).long() if EVIDENCE[name].integer else torch.cat(list(parts))


def _tensors(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns with tensors for arrays. Raises Unreadable for what no run writes."""
    for name in columns:
        if name.endswith("logprobs"):
            for row, cell in enumerate(columns[name]):
                if np.isnan(cell).any():
                    raise Unreadable(f"{name} holds a NaN in row {row}")
    return {
        name: [torch.from_numpy(cell) for cell in cells] if cells and isinstance(cells[0], np.ndarray) else cells
        for name, cells in columns.items()
    }


def _row(scored: ScoredGroup, i: int) -> dict[str, Any]:
    group, rollout = scored.group, scored.group.rollouts[i]
    return {
        "prompt_id": group.prompt.id,
        "domain": group.prompt.domain,
        "prompt": group.prompt.text,
        "prompt_ids": group.prompt.token_ids,
        "answer": group.prompt.answer,
        "policy_version": group.policy_version,
        "completion": rollout.text,
        "completion_ids": rollout.token_ids,
        "finish_reason": rollout.finish_reason,
        "grade": float(scored.evidence["grades"][i]),
        "num_grader_errors": scored.num_grader_errors,
        "rollout_logprobs": rollout.logprobs.numpy(),
    }


def _group(prompt: Prompt, columns: Mapping[str, list[Any]], rows: Sequence[int]) -> ScoredGroup:
    def of(name: str) -> tuple[Any, ...]:
        return tuple(columns[name][row] for row in rows)

    streams = zip(of("completion_ids"), of("rollout_logprobs"), of("finish_reason"), of("completion"), strict=True)
    rollouts = tuple(
        Rollout(token_ids=tuple(token_ids.tolist()), logprobs=logprobs, finish_reason=reason, text=text)
        for token_ids, logprobs, reason, text in streams
    )
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, rollouts=rollouts, policy_version=of("policy_version")[0]),
        evidence=replace(
            Ragged.of([[rollout.token_ids for rollout in rollouts]]),
            tokens={name: _stream(name, of(name)) for name, row in EVIDENCE.items() if name in columns and row.axes != "rollout"},
            rollouts={"grades": torch.tensor(of("grade"))},
        ),
        num_grader_errors=of("num_grader_errors")[0],
    )
