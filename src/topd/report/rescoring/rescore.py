"""`topd rescore`: the credit of stored rollouts under other settings, without sampling or scoring again.

run folder + changed keys of `[algorithm]` -> RUN/rescores/NAME.json

The shape of the file is `Rescore` of difference.py. Nothing else in the folder is touched, and it may be that of a run in
training.

The credit is the algorithm's own (`topd.algorithms`), on the stored log-probs and grades. It is first computed under the run's
own settings: only if that gives the stored advantages back does the comparison mean anything.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topd import __version__, config_file
from topd.config import AlgorithmConfig
from topd.errors import ConfigError, RunStopped
from topd.report.rescoring.difference import FORMAT, ChangedToken, Credited, Rescore, Row, binned, edges_for, row, sums_of
from topd.report.rescoring.recredit import check_stored, credited, evidence
from topd.report.stored import StoredRun, read_run
from topd.report.stored_step import StoredStep
from topd.run.files import spans, write_json

TOLERANCE = 1e-5
"""Largest allowed difference of a recomputed advantage from the stored one, times max(1, |advantage|)."""

NUM_CHANGED = 10


def rescore(
    path: Path | str, overrides: Sequence[str], *, steps: Sequence[int] | None = None, name: str | None = None
) -> Rescore:
    """Recompute, compare, and write RUN/rescores/NAME.json; returns what it holds.

    `overrides`: words as `--algorithm.alpha 0.1`. A new `algorithm.type` begins with that algorithm's defaults. `steps`: all that
    are stored, if None. `name`: made of the settings, if None. Raises ConfigError for settings outside credit, for an
    algorithm that needs what was not stored, and if the run's own settings do not give the stored advantages back.
    """
    run = read_run(path)
    given = _given(overrides)
    old, new = _settings(run, given)
    name = _name(given, steps, name)
    work = _Comparison(run, old, new)
    for number in _chosen(run, steps):
        if (stored := run.step(number)) is not None and any(group.num_tokens for group in stored.groups):
            work.add(stored)
        elif steps is not None:
            raise ConfigError(
                f"--steps: step {number} cannot be used: {'; '.join(run.problems) or 'it holds no tokens'}. Leave it out."
            )
        else:
            work.skipped.append(number)
    result = work.result(name, given)
    target = run.path / "rescores" / f"{name}.json"
    try:
        write_json(target, result)
    except (OSError, RunStopped) as error:
        raise ConfigError(f"{target} could not be written: {error.__cause__ or error}. Fix that, then rescore again.") from error
    return result


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of `[algorithm]` that were given, without the section."""
    given = {}
    for key, value in config_file.parse_overrides(overrides):
        section, _, rest = key.partition(".")
        if section != "algorithm" or not rest:
            raise ConfigError(
                f"--{key} cannot be changed here: the rollouts are stored, so only the credit can be recomputed, which is a "
                "matter of [algorithm]. Give --algorithm.KEY value, or train a new run."
            )
        given[rest] = value
    if not given:
        raise ConfigError("there is nothing to recompute: give at least one changed setting, such as --algorithm.alpha 0.1.")
    return given


def _settings(run: StoredRun, given: Mapping[str, Any]) -> tuple[AlgorithmConfig, AlgorithmConfig]:
    """The run's own settings, and those with the changes."""
    table = run.setting("algorithm")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{run.path / 'config.toml'} has no readable [algorithm] table. Put the run's configuration back.")
    keeps = given.get("type", table.get("type")) == table.get("type")
    old = _algorithm(table, f"{run.path / 'config.toml'}: ")
    try:
        return old, _algorithm({**(table if keeps else {}), **given})
    except ConfigError as error:
        if not keeps or "would be ignored" not in str(error):
            raise
        raise ConfigError(f"{error} (The other keys are the run's own; give --algorithm.KEY to set one back.)") from None


def _algorithm(table: Mapping[str, Any], where: str = "") -> AlgorithmConfig:
    try:
        return config_file.algorithm_section(table)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _name(given: Mapping[str, Any], steps: Sequence[int] | None, name: str | None) -> str:
    """A file name. A given name is refused rather than changed."""
    if name is not None:
        if not re.fullmatch(r"[\w=+,-][\w.=+,-]{0,99}", name, re.ASCII):
            raise ConfigError(
                f"--name must be 1 to 100 letters, digits or any of ._=+,- and not begin with a dot; found {name!r}. "
                "Choose another."
            )
        return name
    text = ",".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items())
    if steps is not None:
        text += f",steps={'+'.join(map(str, steps))}"
    return re.sub(r"[^A-Za-z0-9_.=+,-]", "_", text)[:100]


def _chosen(run: StoredRun, steps: Sequence[int] | None) -> Sequence[int]:
    if not run.steps:
        raise ConfigError(f"the run in '{run.path}' has no rollouts yet. Wait for its first step, or name another run.")
    missing = sorted(set(steps or ()) - set(run.steps))
    if missing or (steps is not None and not steps):
        raise ConfigError(
            f"--steps: there are no rollouts of step {spans(missing) or 'none'}; there are steps {spans(run.steps)}."
        )
    return run.steps if steps is None else sorted(set(steps))


class _Comparison:
    """Sums and counts over the steps so far, never the steps themselves."""

    def __init__(self, run: StoredRun, old: AlgorithmConfig, new: AlgorithmConfig) -> None:
        self.run, self.old, self.new = run, old, new
        self.skipped: list[int] = []
        self.rows: list[Row] = []
        self.sums: dict[str, float] = {}
        self.largest: float | None = None
        self.same = True
        self.top: list[ChangedToken] = []
        self.edges: tuple[Any, Any, Any] = (None, None, None)
        self.counts: list[Any] = []

    def add(self, step: StoredStep) -> None:
        for config in (self.old, self.new):
            check_stored(step, config, own=self.old.type)
        flat = evidence(step)
        old, new = credited(flat, self.old), credited(flat, self.new)
        self._check_own(step, old)
        sums, both = sums_of(old, new, groups=len(step.groups))
        self.sums = {key: value + self.sums.get(key, 0.0) for key, value in sums.items()}
        self.rows.append(row(sums, step.step))
        a, b = old.advantage[both], new.advantage[both]
        self.same = self.same and bool(np.array_equal(a, b))
        self._count(a, b)
        self._keep_top(step, old, new, both)

    def _check_own(self, step: StoredStep, own: Credited) -> None:
        """Raises ConfigError unless the run's own settings give the stored advantages back."""
        parts = [rollout.streams.get("advantage") for rollout in step.rollouts]
        there = [part for part in parts if part is not None]
        if len(there) < len(parts):
            return
        stored = np.concatenate(there).astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(stored - own.advantage)
        equal = (stored == own.advantage) | (np.isnan(stored) & np.isnan(own.advantage))
        apart = np.where(equal, 0.0, np.where(np.isnan(apart), np.inf, apart))
        differ = int(np.count_nonzero(apart > TOLERANCE * np.maximum(1.0, np.where(np.isfinite(stored), np.abs(stored), 1.0))))
        if differ:
            raise ConfigError(
                f"step {step.step}: under the run's own settings the credit is not the stored one: {differ:,} of {len(stored):,} "
                f"advantages differ, by up to {apart.max():.3g}. Either another version of topd made the run (see "
                "environment.json), or config.toml or the rollouts were changed since; a comparison would mean nothing."
            )
        self.largest = max(self.largest or 0.0, float(apart.max()))

    def _count(self, a: Any, b: Any) -> None:
        if not self.counts:
            self.edges = (edges_for(a, b), edges_for(a), edges_for(b))
            n = len(self.edges[0]) - 1
            self.counts = [np.zeros(n, int), np.zeros(n, int), np.zeros((n, n), int)]
        shared, old_edges, new_edges = self.edges
        n = len(shared) - 1
        for counts, values in zip(self.counts, (a, b), strict=False):
            counts += np.bincount(binned(values, shared), minlength=n)
        self.counts[2] += np.bincount(binned(a, old_edges) * n + binned(b, new_edges), minlength=n * n).reshape(n, n)

    def _keep_top(self, step: StoredStep, old: Credited, new: Credited, both: Any) -> None:
        change = np.where(both, np.abs(np.where(both, new.advantage, 0) - np.where(both, old.advantage, 0)), -1.0)
        ends = np.cumsum([len(rollout.token_ids) for rollout in step.rollouts])
        owners = [(group, rollout) for group in step.groups for rollout in group.rollouts]
        for i in np.argsort(-change, kind="stable")[:NUM_CHANGED].tolist():
            if change[i] <= 0:
                break
            place = int(np.searchsorted(ends, i, side="right"))
            group, rollout = owners[place]
            position = i - int(ends[place]) + len(rollout.token_ids)
            self.top.append(
                {
                    "step": step.step,
                    "group": group.index,
                    "rollout": rollout.index,
                    "position": position,
                    "token_id": rollout.token_ids[position],
                    "prompt_id": group.prompt_id,
                    "old": float(old.advantage[i]),
                    "new": float(new.advantage[i]),
                }
            )
        self.top.sort(key=lambda token: -abs(token["new"] - token["old"]))
        del self.top[NUM_CHANGED:]

    def result(self, name: str, given: Mapping[str, Any]) -> Rescore:
        if not self.rows:
            raise ConfigError(f"no rollouts of '{self.run.path}' can be read: {'; '.join(self.run.problems)}.")
        old, new = self.old.model_dump(), self.new.model_dump()
        shared, old_edges, new_edges = (edges.tolist() for edges in self.edges)
        return {
            "format": FORMAT,
            "name": name,
            "topd_version": __version__,
            "changed": {key: {"old": old.get(key), "new": new[key]} for key in given if old.get(key) != new[key]},
            "old": old,
            "new": new,
            "largest_difference": self.largest,
            "steps": self.rows,
            "overall": row(self.sums, None),
            "skipped_steps": self.skipped,
            "num_tokens": int(self.sums["tokens"]),
            "same": self.same,
            "histogram": {"edges": shared, "old": self.counts[0].tolist(), "new": self.counts[1].tolist()},
            "joint": {"old_edges": old_edges, "new_edges": new_edges, "counts": self.counts[2].tolist()},
            "top_changes": self.top,
        }
