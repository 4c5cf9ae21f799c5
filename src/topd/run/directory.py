"""The run folder: the only place a run writes to, and the only output format.

config.toml  credit.json  environment.json  vocabulary.parquet  probe.json  metrics.jsonl  evals.jsonl
rollouts/step_000001.parquet  updates/step_000001.parquet  checkpoints/step_000010/  model/  summary.json
digests.jsonl of all of them; with a served teacher teachers.json and teacher_scores.sqlite, and with run.trackers trackers/
"""

import fcntl
import itertools
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from topd import __version__, config_file, config_keys
from topd.config import Config, sections
from topd.errors import ConfigError, first_line
from topd.plugins import provenance
from topd.run import digests
from topd.run.files import PARTIAL, append_line, flat, remove, text_of, whole, write_json, write_text

SCORES = "teacher_scores.sqlite"
"""Answers of served teachers that are not in rollouts/ yet."""

_TRACES = {".lock", digests.NAME, SCORES, f"{SCORES}-wal", f"{SCORES}-shm", "handover"}
"""Files that may be in a folder before its run begins."""


class RunDirectory:
    """Paths and records of one run. Opened by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.vocabulary = path / "vocabulary.parquet"
        self.metrics_log = path / "metrics.jsonl"
        self.evals_log = path / "evals.jsonl"
        self.teachers = path / "teachers.json"
        self.digests = digests.Digests(path)

    def begin(self, config: Config, data_sha256: str, held_out_sha256: str) -> list[str]:
        """Record configuration and environment, once all checks have passed; remove partial files.

        Returns missing records, one sentence each. Raises ConfigError if the run began with other training or held-out data.
        """
        served = bool(config.served_teachers())
        lost = self._lost(served) if (self.path / "config.toml").is_file() else []
        recorded = self.path / "environment.json"
        now = {"data_sha256": data_sha256, "held_out_sha256": held_out_sha256}
        plugins = {path: provenance(path) for path in config.plugins()}
        before = self._environment(recorded) if recorded.is_file() else environment() | now | {"plugins": plugins}
        lost += [
            f"{path} is not the module that the run began with: its file has changed"
            for path, origin in before.get("plugins", {}).items()
            if path in plugins and plugins[path]["sha256"] != origin["sha256"]
        ]
        for key, what in (("data_sha256", "training"), ("held_out_sha256", "held-out")):
            if before.get(key, now[key]) != now[key]:
                raise ConfigError(
                    f"the {what} problems are not those of the run in {self.path} (their digest has changed). Restore the data "
                    "to resume, or start a new run in another run.directory."
                )
        for leftover in [*self.path.glob(f"*{PARTIAL}"), *self.path.glob(f"*/*{PARTIAL}")]:
            remove(leftover)
        self.digests.begin(self.metrics_log, self.evals_log)
        write_text(self.path / "config.toml", config_file.dump(config), self.digests.note)
        write_json(recorded, before, self.digests.note)
        write_json(self.path / "credit.json", config.algorithm.describe(), self.digests.note)
        return lost

    def _lost(self, served: bool) -> list[str]:
        """Missing records, one sentence each. `served`: whether a teacher is served."""
        recorded = {self.path / "environment.json": "data"} | ({self.teachers: "served teachers"} if served else {})
        lost = [
            f"{path.name} is missing: that the {what} are unchanged is not proven"
            for path, what in recorded.items()
            if not path.is_file()
        ]
        return [*([self.digests.lost] if self.digests.lost else []), *lost]

    def _environment(self, path: Path) -> dict[str, Any]:
        reason = self.digests.difference(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            reason = reason or ("" if isinstance(value, dict) else "it is not a JSON object")
        except (OSError, ValueError, RecursionError) as error:
            reason = reason or first_line(error)
        if reason:
            raise ConfigError(
                f"{path} is damaged: {reason}. It holds the digests of the data that the run began with. Restore it; or delete "
                "it, if you are sure that the data are the same, and the run continues with the present data."
            )
        return dict(value)

    def write_probe(self, checks: Sequence[Mapping[str, Any]]) -> None:
        """Record the results of the probe, for the report."""
        write_json(self.path / "probe.json", {"checks": list(checks)}, self.digests.note)

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def updates(self, step: int) -> Path:
        return self.path / "updates" / f"step_{step:06d}.parquet"

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        self._add(self.metrics_log, row)

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        self._add(self.evals_log, row)

    def _add(self, log: Path, row: Mapping[str, Any]) -> None:
        self.digests.note_line(log, row)
        append_line(log, row)

    def metrics(self) -> list[dict[str, Any]]:
        """Raises ConfigError for a damaged line, as `evaluations` does."""
        return in_order(self.metrics_log, self.digests.lines(self.metrics_log))

    def evaluations(self) -> list[dict[str, Any]]:
        return in_order(self.evals_log, self.digests.lines(self.evals_log))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary, self.digests.note)

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run will repeat, and duplicate lines."""
        for path, rows in ((self.metrics_log, self.metrics()), (self.evals_log, self.evaluations())):
            kept = [text_of(row) for row in rows if row.get("step", 0) <= step]
            if path.is_file():
                write_text(path, "".join(f"{line}\n" for line in kept))


def in_order(path: Path, lines: Iterable[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    """Rows of a log without duplicates. Raises ConfigError for a damaged line, and for steps out of order."""
    rows = list({text_of(row): row for row in whole(path, lines)}.values())
    for row, after in itertools.pairwise(rows):
        if after.get("step", 0) < row.get("step", 0):
            raise ConfigError(
                f"{path}: step {after['step']} comes after step {row['step']}, so lines were moved. Restore their order."
            )
    return rows


@contextmanager
def open_run(config: Config) -> Iterator[RunDirectory]:
    """Lock the folder of a new or resumed run; `begin` then claims it. Raises ConfigError if the folder is unusable."""
    try:
        path = Path(config.run.directory).expanduser()
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        _check_claim(path, config)
        lock = (path / ".lock").open("a")
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: the home of an unknown user; ValueError: a NUL in the name
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'run.directory = "{config.run.directory}" cannot be written: {reason}. Choose a folder that you may write to.'
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f'run.directory = "{path}" is in use by another process. Wait for it, stop it, or choose another folder.'
            ) from error
        try:
            yield RunDirectory(path)
        except ConfigError:  # nothing was computed: leave no trace for the corrected command
            entries = list(path.iterdir())
            if {entry.name for entry in entries} <= _TRACES:
                for entry in entries:
                    remove(entry)
                if is_new:
                    path.rmdir()
            raise


def check_unused(config: Config) -> None:
    """Raise ConfigError if a run is active in the folder: a probe would replace its servers' weights."""
    lock = Path(config.run.directory).expanduser() / ".lock"
    if not lock.is_file():
        return
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f'a run is active in run.directory = "{lock.parent}", and this would disturb its servers. Wait for it, or set '
                "another folder."
            ) from error


def _check_claim(path: Path, config: Config) -> None:
    recorded = path / "config.toml"
    if config.run.resume and recorded.is_file():
        _check_unchanged(recorded, config)
    elif any(entry.name not in _TRACES and not entry.name.endswith(PARTIAL) for entry in path.iterdir()):
        remedy = (
            "it holds no config.toml, so there is no run to resume. Choose another folder."
            if config.run.resume
            else "Add --run.resume true to resume it, or choose another folder, or delete it."
        )
        raise ConfigError(f'run.directory = "{path}" is not empty: {remedy}')


def _check_unchanged(recorded: Path, config: Config) -> None:
    try:
        before = flat(config_file.renewed(tomllib.loads(recorded.read_text(encoding="utf-8"))))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{recorded} is damaged ({first_line(error)}). Restore the run's configuration to resume it."
        ) from error
    now = flat(tomllib.loads(config_file.dump(config)))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    free = {prefix + key for prefix, section in sections(config) for key in section.MAY_CHANGE}
    defaults = {key: info.get_default(call_default_factory=True) for key, info in config_keys.all_settings()}
    refused = [key for key in changed if key not in free and (key in before or now[key] != defaults.get(key))]
    if "run.steps" in changed and config.trainer.schedule != "constant":
        refused.append("run.steps")
    if refused and (reason := digests.Digests(recorded.parent).difference(recorded)):
        raise ConfigError(f"{recorded} is damaged: {reason}. Restore the run's configuration to resume it.")
    if refused:
        changes = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in refused)
        raise ConfigError(
            f"the configuration is not that of the run in {recorded.parent}: {changes}. Change it back to resume, or start a new "
            "run in another run.directory. (run.steps may change if trainer.schedule is constant.)"
        )


def environment() -> dict[str, Any]:
    """Versions, commit and machine: the facts besides the configuration that a result depends on."""
    import torch

    packages = (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "pyarrow",
        "reasoning-gym",
        "math-verify",
        "peft",
        "httpx2",
    )
    return {
        "packages": {"topd": __version__} | {name: number for name in packages if (number := _version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, if topd runs from one; "-dirty" if it has uncommitted changes."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # installed, perhaps inside a repository that is not ours
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--match", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
