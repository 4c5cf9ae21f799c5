"""A run folder as it is found: finished, running, interrupted or damaged.

Reading never changes it and needs neither torch nor the model. What cannot be read is named in `problems`, and left out.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from topd.errors import ConfigError, first_line
from topd.run import vocabulary
from topd.run.files import parsed_lines

Numbers = np.ndarray[Any, np.dtype[np.float32]]

_STREAM_OF = {
    "behaviour_logprobs": "student_logprob",
    "teacher_logprobs": "teacher_logprob",
    "token_rewards": "reward",
    "returns": "return",
    "advantages": "advantage",
}
_ROW = ("prompt_id", "domain", "prompt", "answer", "policy_version", "completion", "finish_reason", "reward")
_MAY_BE_NULL = ("answer",)
_UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError)
"""What a table raises that is damaged, or is of another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One completion. Every stream holds one number per token; what the run did not store is absent.

    Streams: student_logprob, teacher_logprob, log_ratio, reward, return, advantage (nats, but the last) as the step's credit saw
    them; importance_ratio and clipped (0 or 1) as the last update that used the completion saw them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Everything but the rollouts, which `step` reads one at a time."""

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any] | None
    rescores: tuple[Mapping[str, Any], ...]
    steps: tuple[int, ...]
    """Steps whose rollouts are there."""
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def planned_steps(self) -> int | None:
        steps = self.setting("run.steps")
        return steps if isinstance(steps, int) else None

    @property
    def finished(self) -> bool:
        return self.summary is not None and len(self.metrics) >= (self.planned_steps or 0)

    def setting(self, key: str) -> Any:
        """A setting of the resolved configuration by its dotted key; None if it is not set."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def series(self, metric: str) -> list[float | None]:
        """A metric over the recorded steps; None where it is absent or no number."""
        return [number(row.get(metric)) for row in self.metrics]

    def vocabulary(self) -> Mapping[int, tuple[bytes, bool]]:
        """Token id -> (bytes, special). Empty, with a problem noted, if the run has none."""
        path = self.path / "vocabulary.parquet"
        try:
            return vocabulary.read(path)
        except (OSError, pa.ArrowException) as error:
            self._note(f"{path.name} could not be read, so tokens are shown by their ids ({first_line(error)})")
            return {}

    def step(self, step: int) -> StoredStep | None:
        """The rollouts of a step; None, with a problem noted, if they cannot be read."""
        path = self.path / "rollouts" / f"step_{step:06d}.parquet"
        try:
            table = pq.read_table(path, partitioning=None)
            updates = self._updates(step)
            groups = tuple(_groups(table, updates))
        except _UNREADABLE as error:
            self._note(f"rollouts of step {step} could not be read ({first_line(error)})")
            return None
        if any(rollout.update is None and (g.prompt_id, rollout.index) in updates for g in groups for rollout in g.rollouts):
            self._note(f"importance ratios of step {step} are those of other rollouts and were left out")
        return StoredStep(step=step, groups=groups)

    def _updates(self, step: int) -> dict[tuple[str, int], dict[str, Any]]:
        """(prompt id, rollout) -> what the last update that used it saw. Empty while the step's updates are being made."""
        path = self.path / "updates" / f"step_{step:06d}.parquet"
        if not path.is_file():
            return {}
        try:
            table = pq.read_table(path, partitioning=None)
            columns = {name: _cells(table[name]) for name in table.column_names}
            rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            return {(row["prompt_id"], row["rollout"]): _update(row) for row in rows}
        except _UNREADABLE as error:
            self._note(f"importance ratios of step {step} could not be read ({first_line(error)})")
            return {}

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def read_run(path: Path | str) -> StoredRun:
    """Raises ConfigError if the folder is not there or holds no run."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"there is no run folder at '{path}'. Give the run.directory of a run.")
    if not (path / "config.toml").is_file():
        raise ConfigError(
            f"'{path}' holds no config.toml: it is no run folder, or its run has not begun yet. Give the run.directory of a run."
        )
    problems: list[str] = []
    return StoredRun(
        path=path,
        config=_config(path / "config.toml", problems),
        environment=_json(path / "environment.json", problems) or {},
        metrics=tuple(_metrics(path / "metrics.jsonl", problems)),
        evaluations=tuple(_evaluations(path / "evals.jsonl", problems)),
        summary=_json(path / "summary.json", problems),
        rescores=tuple(
            found for file in sorted((path / "rescores").glob("*.json")) if (found := _json(file, problems)) is not None
        ),
        steps=tuple(_steps(path / "rollouts")),
        problems=problems,
    )


def names(runs: Sequence[StoredRun]) -> list[str]:
    """What the runs are called: the names of their folders, with the parent where two are the same."""
    short = [run.name for run in runs]
    longer = [
        name if short.count(name) == 1 else f"{run.path.resolve().parent.name}/{name}"
        for run, name in zip(runs, short, strict=True)
    ]
    return [name if longer.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(longer, 1)]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def _steps(folder: Path) -> Iterator[int]:
    for file in sorted(folder.glob("step_*.parquet")):
        digits = file.stem.removeprefix("step_")
        if digits.isdecimal():
            yield int(digits)


def _metrics(path: Path, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    for row in _lines(path, problems):
        if _is_count(row.get("step")):
            yield row
        else:
            problems.append(f"a line of {path.name} names no step and was left out")


def _evaluations(path: Path, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    for row in _lines(path, problems):
        interval = row.get("ci95")
        numbers = [row.get("avg_at_k"), *(interval if isinstance(interval, list) else [None])]
        is_named = isinstance(row.get("benchmark"), str) and isinstance(row.get("model"), str) and _is_count(row.get("step"))
        if is_named and len(numbers) == 3 and all(number(value) is not None for value in numbers):
            yield row
        else:
            problems.append(f"a line of {path.name} is no evaluation and was left out")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lines(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    try:
        found = list(parsed_lines(path))
    except OSError as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return []
    problems += [
        f"{path.name}, line {i} is damaged and was left out" for i, row in enumerate(found, 1) if isinstance(row, Exception)
    ]
    return [row for row in found if not isinstance(row, Exception)]


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return None


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return {}


def _groups(table: pa.Table, updates: Mapping[tuple[str, int], Mapping[str, Any]]) -> Iterator[StoredGroup]:
    columns = {name: table[name].to_pylist() for name in _ROW}
    if absent := [name for name in _ROW if name not in _MAY_BE_NULL and None in columns[name]]:
        raise ValueError(f"{absent[0]} is null")
    ids = _cells(table["completion_ids"])
    streams = {name: _cells(table[column]) for column, name in _STREAM_OF.items() if column in table.column_names}
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
    if streams.keys() >= {"teacher_logprob", "student_logprob"}:
        with np.errstate(invalid="ignore"):
            streams["log_ratio"] = streams["teacher_logprob"] - streams["student_logprob"]
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
        grade=row["reward"],
        streams=streams,
        update=update["update"] if update is not None else None,
    )


def _cells(column: pa.ChunkedArray) -> list[Any]:
    """A column's cells: one array per list, sharing one buffer; plain values otherwise; None where it is null."""
    array = column.combine_chunks()
    if not pa.types.is_list(array.type):
        return array.to_pylist()
    values = array.values.to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy().tolist()
    valid = array.is_valid().to_pylist()
    return [values[a:b] if ok else None for ok, a, b in zip(valid, starts[:-1], starts[1:], strict=True)]
