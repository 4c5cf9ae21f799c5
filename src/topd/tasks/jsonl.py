"""Problems from JSON lines: one object a line, with the fields of tasks/rows.py; numbers keep their text."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from topd.config import GradedTaskConfig
from topd.errors import ConfigError
from topd.plugins import GRADER
from topd.tasks.rows import Number, check_fields, problem_from
from topd.tasks.task import Problem, Task, refuse_contradictions, split_task

BUILTIN = Path(__file__).parent.parent / "builtin"


class Config(GradedTaskConfig):
    type: Literal["jsonl"] = "jsonl"
    path: str = Field(
        description="Training file: one JSON object a line with prompt, answer and so on; docs/data.md lists the forms."
    )
    eval_path: str | None = Field(None, description="Held-out file of the same form.")


def make(section: Config, *, seed: int) -> Task:
    held_out = read(section.eval_path, "task.eval_path") if section.eval_path else []
    return split_task(read(section.path, "task.path"), held_out, GRADER.make(section.grader))


def read(name: str, key: str) -> list[Problem]:
    """All problems of a file; `builtin:NAME` is a file that ships with the package."""
    path = BUILTIN / name.removeprefix("builtin:") if name.startswith("builtin:") else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path} (looked from {Path.cwd()}).")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at U+2028 inside a string
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{key}: {path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert or unpack it."
        ) from None
    problems = [_problem(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise ConfigError(f"{key}: {path} holds no problem. Give one JSON object a line.")
    refuse_contradictions(problems)
    return problems


def _problem(line: str, where: str) -> Problem:
    row = parse_row(line, where)
    check_fields(row, where)
    return problem_from(row, where)


def parse_row(line: str, where: str) -> dict[str, Any]:
    """The object of one line; numbers keep their text. Raises ConfigError, with `where`, for anything else."""
    try:
        row = json.loads(line, parse_constant=_refuse, parse_int=Number, parse_float=Number, object_pairs_hook=_object)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is valid JSON and no text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({getattr(error, 'msg', error)}). Every line must be one object.") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: found {type(row).__name__}, every line must be one JSON object.")
    return row


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a field is given twice among {', '.join(name for name, _ in pairs)}")
    return fields
