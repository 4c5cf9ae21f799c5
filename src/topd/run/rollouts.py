"""Rollouts on disk: one parquet file a step, one row a completion, every per-token stream beside it.

A step whose file is there is not sampled or scored again: a resumed run reads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from topd.run.files import replacing
from topd.types import Credit, Prompt, Rollout, RolloutGroup, ScoredGroup

_LOGPROBS = pa.list_(pa.float32())
SCHEMA = pa.schema(
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
        ("reward", pa.float32()),
        ("num_grader_errors", pa.int32()),
        ("rollout_logprobs", _LOGPROBS),
        ("behaviour_logprobs", _LOGPROBS),
        ("old_logprobs", _LOGPROBS),
        ("teacher_logprobs", _LOGPROBS),
        ("token_rewards", _LOGPROBS),
        ("advantages", _LOGPROBS),
    ]
)


def write(path: Path, groups: Sequence[ScoredGroup], credit: Credit) -> None:
    """Store a step. `num_grader_errors` counts the whole group and stands in each of its rows."""
    lengths = [len(completion) for scored in groups for completion in scored.group.completions]
    streams = zip(credit.token_rewards.split(lengths), credit.advantages.split(lengths), strict=True)
    rows = [_row(scored, i, *next(streams)) for scored in groups for i in range(len(scored.group.rollouts))]
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")


def read(path: Path, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
    """The groups of a step, in the order of its prompts. They carry exactly the numbers that were written."""
    rows = pq.read_table(path).to_pylist()
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt_id"], []).append(row)
    return [_group(prompt, by_prompt[prompt.id]) for prompt in prompts]


def _row(scored: ScoredGroup, i: int, token_rewards: torch.Tensor, advantages: torch.Tensor) -> dict[str, Any]:
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
        "reward": float(scored.rewards[i]),
        "num_grader_errors": scored.num_grader_errors,
        "rollout_logprobs": rollout.logprobs.numpy(),
        "behaviour_logprobs": scored.behaviour_logprobs[i].numpy(),
        "old_logprobs": scored.old_logprobs[i].numpy(),
        "teacher_logprobs": None if scored.teacher_logprobs is None else scored.teacher_logprobs[i].numpy(),
        "token_rewards": token_rewards.numpy(),
        "advantages": advantages.numpy(),
    }


def _group(prompt: Prompt, rows: Sequence[dict[str, Any]]) -> ScoredGroup:
    def stream(name: str) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(row[name], dtype=torch.float32) for row in rows)

    rollouts = tuple(
        Rollout(
            token_ids=tuple(row["completion_ids"]),
            logprobs=logprobs,
            finish_reason=row["finish_reason"],
            text=row["completion"],
        )
        for row, logprobs in zip(rows, stream("rollout_logprobs"), strict=True)
    )
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, rollouts=rollouts, policy_version=rows[0]["policy_version"]),
        rewards=torch.tensor([row["reward"] for row in rows]),
        behaviour_logprobs=stream("behaviour_logprobs"),
        old_logprobs=stream("old_logprobs"),
        teacher_logprobs=None if rows[0]["teacher_logprobs"] is None else stream("teacher_logprobs"),
        num_grader_errors=rows[0]["num_grader_errors"],
    )
