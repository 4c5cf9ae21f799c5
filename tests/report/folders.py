"""Run folders built by hand: any numbers, any text."""

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from pydantic import ValidationError

from topd import algorithms
from topd.errors import ConfigError
from topd.run import vocabulary
from topd.run.columns import ROLLOUTS, UPDATES

TOPD = {"type": "topd", "alpha": 0.2, "reward": "proximal", "returns": "mean_of_future", "normalize": "group_tokens"}


def by_hand(alpha: float) -> list[list[float]]:
    """Advantages of the published test vector, the slow and plain way."""
    returns = []
    for student, teacher in zip(STUDENT, TEACHER, strict=True):
        rewards = [math.log(alpha * math.exp(t - s) + 1 - alpha) for s, t in zip(student, teacher, strict=True)]
        later = [rewards[k + 1 :] for k in range(len(rewards))]
        returns.append([reward + (sum(rest) / len(rest) if rest else 0.0) for reward, rest in zip(rewards, later, strict=True)])
    together = [value for part in returns for value in part]
    mean, std = statistics.mean(together), statistics.stdev(together)
    return [[(value - mean) / std for value in part] for part in returns]


STUDENT, TEACHER = [[-0.5, -1.0, -0.2], [-0.4, -0.1]], [[-0.3, -2.0, -0.2], [-0.1, -0.6]]
VECTOR: tuple[dict[str, Any], ...] = tuple(
    {"ids": ids, "student": student, "teacher": teacher, "advantage": advantage}
    for ids, student, teacher, advantage in zip([[9, 14, 1], [7, 1]], STUDENT, TEACHER, by_hand(0.2), strict=True)
)
"""The published test vector: two completions, credited with alpha 0.2."""

Completion = Mapping[str, Any]


def write_step(path: Path, groups: Mapping[str, Sequence[Completion]], step: int = 1, **columns: Any) -> None:
    """A step's rollouts. A completion has ids and student, and may have teacher, token_reward, return, advantage and grade."""
    rows = [row(prompt_id, completion) | columns for prompt_id, of_group in groups.items() for completion in of_group]
    file = path / "rollouts" / f"step_{step:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ROLLOUTS), file)


def row(prompt_id: str, completion: Completion) -> dict[str, Any]:
    zeros = [0.0] * len(completion["ids"])
    return {
        "prompt_id": prompt_id,
        "domain": "sums",
        "prompt": "3+4+5=",
        "prompt_ids": [5, 12],
        "answer": "12",
        "policy_version": 0,
        "completion": "text",
        "completion_ids": completion["ids"],
        "finish_reason": "stop",
        "grade": completion.get("grade", 0.0),
        "num_grader_errors": 0,
        "rollout_logprobs": completion["student"],
        "behaviour_logprobs": completion["student"],
        "old_logprobs": completion["student"],
        "teacher_logprobs": completion.get("teacher"),
        "token_rewards": completion.get("token_reward", zeros),
        "returns": completion.get("return", zeros),
        "advantages": completion.get("advantage", zeros),
    }


def write_run(
    path: Path,
    groups: Mapping[str, Sequence[Completion]],
    *,
    algorithm: Mapping[str, Any] = TOPD,
    words: Mapping[int, bytes] | None = None,
    **columns: Any,
) -> Path:
    """A run of one step. `words`: token id -> bytes; ids that are not there have no vocabulary entry."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(tomli_w.dumps({"algorithm": dict(algorithm), "run": {"steps": 2}}))
    write_credit(path, algorithm)
    if words is not None:
        vocabulary.write(path / "vocabulary.parquet", [(token_id, text, False) for token_id, text in words.items()])
    write_step(path, groups, **columns)
    return path


def write_credit(path: Path, algorithm: Mapping[str, Any]) -> None:
    """What the algorithm says of its credit; nothing for settings that it refuses."""
    with contextlib.suppress(ConfigError, ValidationError, KeyError):
        facts = algorithms.load(algorithm["type"]).Config(**algorithm).describe()
        (path / "credit.json").write_text(json.dumps(facts))


def write_updates(path: Path, *rows: dict[str, Any], schema: pa.Schema = UPDATES) -> None:
    """What the updates of step 1 saw."""
    (path / "updates").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path / "updates/step_000001.parquet")


def update(number: int | None, ratios: list[float] | None, clipped: list[bool] | None, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": "a",
        "rollout": 0,
        "update": number,
        "importance_ratios": ratios,
        "clipped": clipped,
        **changes,
    }


def floor(alpha: float) -> float:
    return math.log(1 - alpha)


def write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per row; a row without a step gets the next one."""
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, 1)]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def write_evaluations(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
