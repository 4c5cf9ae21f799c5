"""Problems from JSON lines: {"prompt": ..., "answer": ..., "domain": ..., "demonstration": ...}; only prompt is required."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topd.config import JsonlConfig
from topd.errors import ConfigError
from topd.tasks.grading import SCORERS
from topd.tasks.task import Problem, Task, split_task

BUILTIN = Path(__file__).parent.parent / "builtin"
FIELDS = {"prompt", "answer", "domain", "demonstration"}


def load(config: JsonlConfig) -> Task:
    held_out = read(config.eval_path, "task.eval_path") if config.eval_path else []
    return split_task(read(config.path, "task.path"), held_out, SCORERS[config.grader])


def read(name: str, key: str) -> list[Problem]:
    """All problems of a file; `builtin:NAME` is a file that ships with the package."""
    path = BUILTIN / name.removeprefix("builtin:") if name.startswith("builtin:") else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path} (looked from {Path.cwd()}).")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at U+2028 inside a string
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it.") from None
    return [_problem(line, f"{key}: {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _problem(line: str, where: str) -> Problem:
    try:
        row = json.loads(line, parse_constant=_refuse)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is valid JSON and no text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({getattr(error, 'msg', error)}). Every line must be one object.") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: found {type(row).__name__}, every line must be one JSON object.")
    if unknown := set(row) - FIELDS:
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}. Fields are {', '.join(sorted(FIELDS))}.")
    return problem_from(row, where)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def problem_from(row: Mapping[str, Any], where: str) -> Problem:
    """A problem from named fields; numbers are taken as text, anything else is refused."""
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise ConfigError(f"{where}: `prompt` must be a non-empty string, found {row.get('prompt')!r}.")
    for name in ("answer", "domain", "demonstration"):
        if not isinstance(row.get(name), str | int | float | None) or isinstance(row.get(name), bool):
            raise ConfigError(f"{where}: `{name}` must be a string or a number, found {type(row[name]).__name__}.")
    text = {name: None if row.get(name) is None else str(row[name]) for name in ("answer", "demonstration")}
    return Problem(
        question=row["prompt"],
        answer=text["answer"],
        domain=str(row.get("domain") or "default"),
        demonstration=text["demonstration"],
        source=where,
    )
