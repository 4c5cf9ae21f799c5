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

from pydantic import BaseModel, FiniteFloat, ValidationError

from topd.errors import ConfigError, first_line
from topd.report.stored_step import Seen, StoredStep, read_step, read_updates
from topd.run import vocabulary
from topd.run.catalogue import renamed
from topd.run.digests import Digests
from topd.run.files import spans
from topd.run.gaps import lost_evaluations, lost_steps
from topd.run.parquet import UNREADABLE

MOST_STEPS = 10**6
"""A step beyond is damage, not a gap to fill."""


class CreditFacts(BaseModel):
    """credit.json, as AlgorithmConfig.describe gives it."""

    floor: tuple[FiniteFloat, str] | None
    units: dict[str, str]
    unread: dict[str, str]
    advice: dict[str, str]


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
    checks: tuple[Mapping[str, Any], ...] = ()
    """What the probe saw before the run; older runs have none."""
    credit: CreditFacts | None = None
    """What the algorithm says of its credit; older runs have none."""
    problems: list[str] = field(default_factory=list)
    digests: Digests | None = None
    """What its files were when they were written."""

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
        if not path.exists():
            self._note("vocabulary.parquet is not there (older versions did not store it), so tokens are shown by their ids")
            return {}
        try:
            self._check(path)
            return vocabulary.read(path)
        except UNREADABLE as error:
            self._note(f"{path.name} could not be read, so tokens are shown by their ids ({first_line(error)})")
            return {}

    def step(self, step: int) -> StoredStep | None:
        """The rollouts of a step; None, with a problem noted, if they cannot be read."""
        updates = self._updates(step)
        path = self.path / "rollouts" / f"step_{step:06d}.parquet"
        try:
            self._check(path)
            stored = read_step(path, step, updates)
        except UNREADABLE as error:
            self._note(f"rollouts of step {step} could not be read ({first_line(error)})")
            return None
        if any(
            rollout.update is None and (g.prompt_id, rollout.index) in updates for g in stored.groups for rollout in g.rollouts
        ):
            self._note(f"importance ratios of step {step} are those of other rollouts and were left out")
        return stored

    def _updates(self, step: int) -> Seen:
        path = self.path / "updates" / f"step_{step:06d}.parquet"
        try:
            self._check(path)
            return read_updates(path)
        except UNREADABLE as error:
            self._note(f"importance ratios of step {step} could not be read ({first_line(error)})")
            return {}

    def _check(self, path: Path) -> None:
        """Raise ValueError for a file that is not what was written."""
        if self.digests is not None and (reason := self.digests.difference(path)):
            raise ValueError(reason)

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
            f"'{path}' holds no config.toml: it is no run folder, or its run has not begun yet. Give the run.directory of a run."
        )
    problems: list[str] = []
    digests = Digests(path)
    config = _config(path / "config.toml", digests, problems)
    summary = _json(path / "summary.json", digests, problems)
    metrics = _metrics(path / "metrics.jsonl", digests, problems)
    evaluations = list(_evaluations(path / "evals.jsonl", digests, problems)) or _summarised(summary, problems)
    steps = list(_steps(path / "rollouts"))
    if summary is not None and not metrics:
        problems.append("metrics.jsonl is not there, or empty, although the run is finished")
    else:
        problems += _gaps(path, config, metrics, evaluations, summary)
    if missing := [row["step"] for row in metrics if row["step"] not in steps]:
        problems.append(f"rollouts of {len(missing)} of {len(metrics)} recorded steps are not there (steps {spans(missing)})")
    written = [path / "probe.json", *(path / "updates" / f"step_{row['step']:06d}.parquet" for row in metrics)]
    gone = [file.relative_to(path) for file in written if digests.knows(file) and not file.exists()]
    problems += [f"{name} is not there, although the run wrote it" for name in gone]
    return StoredRun(
        path=path,
        config=config,
        environment=_json(path / "environment.json", digests, problems) or {},
        metrics=tuple(metrics),
        evaluations=tuple(evaluations),
        summary=summary,
        rescores=tuple(
            found for file in sorted((path / "rescores").glob("*.json")) if (found := _json(file, digests, problems)) is not None
        ),
        credit=_credit(path / "credit.json", digests, problems),
        checks=tuple(_checks(path / "probe.json", digests, problems)),
        steps=tuple(steps),
        problems=problems,
        digests=digests,
    )


def folder_at(path: Path | str) -> Path:
    """A path that was given. Raises ConfigError for one that the system cannot even look for: too long, a NUL, no such user."""
    try:
        folder = Path(path).expanduser()
        folder.exists()
        folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"'{str(path)[:200]}' is no path: {getattr(error, 'strerror', None) or error}. Give another."
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
    evals = config.get("eval")
    if isinstance(evals, Mapping) and _is_count(every := evals.get("every_steps", 0)):
        has_teacher = evals.get("teacher", True) and ("teacher" in config or "teachers" in config)
        models = ("student", "teacher") if has_teacher else ("student",)
        written = (summary or {}).get("benchmarks")
        names = {row["benchmark"] for row in evaluations} | set(written if isinstance(written, Mapping) else ())
        yield from lost_evaluations(evaluations, dict.fromkeys(sorted(names), models), steps_done, every=every)


def _credit(path: Path, digests: Digests, problems: list[str]) -> CreditFacts | None:
    facts = _json(path, digests, problems)
    try:
        return None if facts is None else CreditFacts.model_validate(facts)
    except ValidationError as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return None


def _checks(path: Path, digests: Digests, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    checks = ((_json(path, digests, problems) or {}).get("checks")) if path.is_file() else None
    for check in checks if isinstance(checks, list) else []:
        if isinstance(check, Mapping) and isinstance(check.get("name"), str) and isinstance(check.get("detail"), str):
            yield check


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


def _metrics(path: Path, digests: Digests, problems: list[str]) -> list[Mapping[str, Any]]:
    """One row a step, in their order; of a step that is there twice the last."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for row in _lines(path, digests, problems):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            problems.append(f"a line of {path.name} names no step and was left out")
            continue
        if step in by_step:
            problems.append(f"{path.name} holds step {step} twice; the last line counts")
        by_step[step] = renamed(row)
    return [by_step[step] for step in sorted(by_step)]


def _evaluations(path: Path, digests: Digests, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    for row in _lines(path, digests, problems):
        if _is_evaluation(row):
            yield row
        else:
            problems.append(f"a line of {path.name} is no evaluation and was left out")


def _is_evaluation(row: Any) -> bool:
    if not isinstance(row, Mapping):
        return False
    interval = row.get("ci95")
    numbers = [row.get("avg_at_k"), *(interval if isinstance(interval, list) else [None])]
    is_named = isinstance(row.get("benchmark"), str) and isinstance(row.get("model"), str) and _is_count(row.get("step"))
    return is_named and len(numbers) == 3 and all(number(value) is not None for value in numbers)


def _summarised(summary: Mapping[str, Any] | None, problems: list[str]) -> list[Mapping[str, Any]]:
    """The evaluations that the summary repeats: base, student and teacher, where evals.jsonl is lost."""
    benchmarks = (summary or {}).get("benchmarks")
    tables = benchmarks.values() if isinstance(benchmarks, Mapping) else ()
    found = [row for table in tables if isinstance(table, Mapping) for row in table.values() if _is_evaluation(row)]
    if found:
        problems.append("evals.jsonl is not there, or empty: the evaluations are those of summary.json")
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lines(path: Path, digests: Digests, problems: list[str]) -> list[Mapping[str, Any]]:
    try:
        found = list(digests.lines(path))
    except OSError as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return []
    problems += [
        f"{path.name}, line {i} is damaged and was left out" for i, row in enumerate(found, 1) if isinstance(row, Exception)
    ]
    return [row for row in found if not isinstance(row, Exception)]


def _json(path: Path, digests: Digests, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        if digests.knows(path):
            problems.append(f"{path.name} is not there, although the run wrote it")
        return None
    try:
        if reason := digests.difference(path):
            raise ValueError(reason)
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return None


def _config(path: Path, digests: Digests, problems: list[str]) -> dict[str, Any]:
    try:
        if reason := digests.difference(path):
            problems.append(f"{path.name}: {reason}; what is said of the settings may be wrong")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read ({first_line(error)})")
        return {}
