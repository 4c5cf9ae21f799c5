"""A run folder in any state: finished, running, interrupted or damaged.

Reading never changes it and needs neither torch nor the model. What cannot be read is named in `problems`, and left out.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, FiniteFloat, ValidationError

from topd.errors import ConfigError, first_line
from topd.report.stored_step import Seen, StoredStep, read_step, read_updates
from topd.run import vocabulary
from topd.run.catalogue import renamed
from topd.run.digests import Digests
from topd.run.files import spans
from topd.run.gaps import lost_evaluations, lost_steps
from topd.run.parquet import Unreadable

MOST_STEPS = 10**6
"""A step beyond is damage, not a gap to fill."""


class CreditFacts(BaseModel):
    """credit.json, as AlgorithmConfig.describe gives it."""

    floor: tuple[FiniteFloat, str] | None
    units: dict[str, str]
    unread: dict[str, str]
    advice: dict[str, str]


class Check(BaseModel):
    """One check of probe.json."""

    name: str
    detail: str
    warning: bool = False


class _Probe(BaseModel):
    checks: tuple[Check, ...]


Shape = TypeVar("Shape", bound=BaseModel)


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
    checks: tuple[Check, ...] = ()
    """Checks of the probe before the run; older runs have none."""
    credit: CreditFacts | None = None
    """Facts that the algorithm states about its credit; older runs have none."""
    problems: list[str] = field(default_factory=list)
    digests: Digests | None = None
    """Digests of its files at the time of writing."""

    @property
    def notes(self) -> list[str]:
        """The problems, and what is not proven."""
        return [*self.problems, *([self.digests.lost] if self.digests is not None and self.digests.lost else [])]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def planned_steps(self) -> int | None:
        steps = self.setting("run.steps")
        return steps if isinstance(steps, int) else None

    @property
    def finished(self) -> bool:
        if self.summary is None:
            return False
        return max(len(self.metrics), number(self.summary.get("steps")) or 0) >= (self.planned_steps or 0)

    def setting(self, key: str) -> Any:
        """A setting of the resolved configuration by its dotted key; None if it is not set."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def series(self, metric: str) -> list[float | None]:
        """A metric over the recorded steps; None where it is absent or no number."""
        return [number(row.get(metric)) for row in self.metrics]

    def vocabulary(self) -> Mapping[int, tuple[bytes, bool]]:
        """Token id -> (bytes, special). Empty, with a problem noted, if the run has none."""
        path = self.path / "vocabulary.parquet"
        if not path.exists():
            self._note("vocabulary.parquet is not there (older versions did not store it), so tokens are shown by their ids")
            return {}
        try:
            return vocabulary.read(self._whole(path))
        except Unreadable as error:
            self._note(f"{path.name} could not be read, so tokens are shown by their ids ({error})")
            return {}

    def step(self, step: int) -> StoredStep | None:
        """The rollouts of a step; None, with a problem noted, if they cannot be read."""
        seen: Seen = {}
        try:
            seen = read_updates(self._whole(self.path / "updates" / f"step_{step:06d}.parquet"))
        except Unreadable as error:
            self._note(f"importance ratios of step {step} could not be read ({error})")
        try:
            stored = read_step(self._whole(self.path / "rollouts" / f"step_{step:06d}.parquet"), step, seen)
        except Unreadable as error:
            self._note(f"rollouts of step {step} could not be read ({error})")
            return None
        if any(rollout.update is None and (g.prompt_id, rollout.index) in seen for g in stored.groups for rollout in g.rollouts):
            self._note(f"importance ratios of step {step} are those of other rollouts and were left out")
        return stored

    def _whole(self, path: Path) -> Path:
        """The same path. Raises Unreadable for a file that is not what was written."""
        try:
            reason = self.digests.difference(path) if self.digests is not None else ""
        except OSError as error:
            reason = first_line(error)
        if reason:
            raise Unreadable(reason)
        return path

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def read_run(path: Path | str) -> StoredRun:
    """Raises ConfigError if the folder is not there or holds no run."""
    is_empty = path == ""
    path = folder_at(path)
    if path.is_file():
        raise ConfigError(f"'{path}' is a file. Give the run folder, which it may be in: '{path.parent}'.")
    if is_empty or not path.is_dir():
        raise ConfigError(f"there is no run folder at '{'' if is_empty else path}'. Give the run.directory of a run.")
    if not (path / "config.toml").is_file():
        raise ConfigError(
            f"'{path}' holds no config.toml: it is not a run folder, or its run has not begun. Give the run.directory of a run."
        )
    reader = _Reader(path)
    config, summary, metrics = reader.config(), reader.json("summary.json"), reader.metrics()
    evaluations = reader.evaluations(summary)
    steps = sorted(_steps(path / "rollouts"))
    if summary is not None and not metrics:
        reader.problems.append("metrics.jsonl is not there, or empty, although the run is finished")
    else:
        reader.problems += _gaps(path, config, metrics, evaluations, summary)
    if missing := [row["step"] for row in metrics if row["step"] not in steps]:
        words = f"rollouts of {len(missing)} of {len(metrics)} recorded steps are not there (steps {spans(missing)})"
        reader.problems.append(words)
    for row in metrics:
        reader.exists(path / "updates" / f"step_{row['step']:06d}.parquet")
    rescores = (reader.json(f"rescores/{file.name}") for file in sorted((path / "rescores").glob("*.json")))
    return StoredRun(
        path=path,
        config=config,
        environment=reader.json("environment.json") or {},
        metrics=tuple(metrics),
        evaluations=tuple(evaluations),
        summary=summary,
        rescores=tuple(rescore for rescore in rescores if rescore is not None),
        credit=reader.parsed("credit.json", CreditFacts),
        checks=getattr(reader.parsed("probe.json", _Probe), "checks", ()),
        steps=tuple(steps),
        problems=reader.problems,
        digests=reader.digests,
    )


def folder_at(path: Path | str) -> Path:
    """A path that was given. Raises ConfigError for one that the system cannot even look for: too long, a NUL, no such user."""
    try:
        folder = Path(path).expanduser()
        folder.exists()
        folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"'{str(path)[:200]}' is not a path: {getattr(error, 'strerror', None) or error}. Give another."
        ) from error
    return folder


def _gaps(
    path: Path,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
) -> Iterator[str]:
    """The steps that must have been recorded, as later ones were or a checkpoint was made after them, and are not."""
    saved = [marker.parent.name[5:11] for marker in path.glob("checkpoints/step_[0-9]*/COMPLETE")]
    done = [*(row["step"] for row in metrics), *(int(step) for step in saved if step.isdecimal())]
    done.append(int(number((summary or {}).get("steps")) or 0))
    steps_done = min(max(done), MOST_STEPS)
    yield from lost_steps(metrics, steps_done)
    evals = _table(config, "eval")
    if evals and _is_count(every := evals.get("every_steps", 0)):
        has_teacher = evals.get("teacher", True) and ("teacher" in config or "teachers" in config)
        models = ("student", "teacher") if has_teacher else ("student",)
        names = {row["benchmark"] for row in evaluations} | _table(summary, "benchmarks").keys()
        yield from lost_evaluations(evaluations, dict.fromkeys(sorted(names), models), steps_done, every=every)


def names(runs: Sequence[StoredRun]) -> list[str]:
    """Labels of the runs: the names of their folders, with the parent where two are the same."""
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


class _Reader:
    """The files of one folder. What cannot be read counts as absent, and is named in `problems`."""

    def __init__(self, path: Path) -> None:
        self.path, self.digests = path, Digests(path)
        self.problems: list[str] = []

    def exists(self, file: Path) -> bool:
        """Note a file that is gone."""
        if not file.is_file() and self.digests.knows(file):
            self.problems.append(f"{file.relative_to(self.path)} is not there, although the run wrote it")
        return file.is_file()

    def json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        try:
            if not self.exists(file):
                return None
            if reason := self.digests.difference(file):
                raise ValueError(reason)
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{file.name} could not be read ({first_line(error)})")
            return None
        return content

    def parsed(self, name: str, shape: type[Shape]) -> Shape | None:
        content = self.json(name)
        try:
            return None if content is None else shape.model_validate(content)
        except ValidationError as error:
            self.problems.append(f"{name} could not be read ({first_line(error)})")
            return None

    def config(self) -> dict[str, Any]:
        file = self.path / "config.toml"
        try:
            if reason := self.digests.difference(file):
                self.problems.append(f"{file.name}: {reason}; what is said of the settings may be wrong")
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{file.name} could not be read ({first_line(error)})")
            return {}

    def lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        try:
            for i, row in enumerate(self.digests.lines(self.path / name), 1):
                if not isinstance(row, Exception):
                    yield row
                else:
                    self.problems.append(f"{name}, line {i} is damaged and was left out")
        except OSError as error:
            self.problems.append(f"{name} could not be read ({first_line(error)})")

    def metrics(self) -> list[Mapping[str, Any]]:
        """One row a step, in their order; of a step that is there twice the last."""
        by_step: dict[int, Mapping[str, Any]] = {}
        for row in self.lines("metrics.jsonl"):
            step = row.get("step")
            if not _is_count(step) or step < 1:
                self.problems.append("a line of metrics.jsonl names no step and was left out")
                continue
            if step in by_step:
                self.problems.append(f"metrics.jsonl holds step {step} twice; the last line counts")
            by_step[step] = renamed(row)
        return [by_step[step] for step in sorted(by_step)]

    def evaluations(self, summary: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        """Rows of evals.jsonl; without them those that the summary repeats."""
        rows = list(self.lines("evals.jsonl"))
        kept = [row for row in rows if is_evaluation(row)]
        self.problems += ["a line of evals.jsonl is not an evaluation and was left out"] * (len(rows) - len(kept))
        tables = _table(summary, "benchmarks").values() if not kept else ()
        repeated = [row for table in tables if isinstance(table, Mapping) for row in table.values() if is_evaluation(row)]
        if repeated:
            self.problems.append("evals.jsonl is not there, or empty: the evaluations are those of summary.json")
        return kept or repeated


def is_evaluation(row: Any) -> bool:
    """True for a row of evals.jsonl: a benchmark, a model, a step, a score and its interval."""
    if not isinstance(row, Mapping):
        return False
    interval = row.get("ci95")
    numbers = [row.get("avg_at_k"), *(interval if isinstance(interval, list) else [None])]
    is_named = isinstance(row.get("benchmark"), str) and isinstance(row.get("model"), str) and _is_count(row.get("step"))
    return is_named and len(numbers) == 3 and all(number(value) is not None for value in numbers)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _table(of: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    """A table below a key; empty if there is none."""
    table = (of or {}).get(key)
    return table if isinstance(table, Mapping) else {}
