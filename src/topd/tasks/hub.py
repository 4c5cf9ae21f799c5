"""Problems from the `datasets` library: a hub id or a local folder of parquet, CSV or JSON files."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from pydantic import Field

from topd.config import GradedTaskConfig
from topd.errors import ConfigError, first_line
from topd.plugins import GRADER
from topd.tasks.rows import ANSWERS, DEMONSTRATIONS, FIELDS, QUESTIONS, Number, check_fields, problem_from
from topd.tasks.task import Problem, Task, refuse_contradictions, split_task

FLOATS: dict[str, type[np.floating[Any]]] = {"float16": np.float16, "float32": np.float32}


class Config(GradedTaskConfig):
    type: Literal["hub"] = "hub"
    name: str = Field(description="Data set id or local folder, as `datasets.load_dataset` takes it.")
    subset: str | None = Field(None, description="Configuration of the data set.")
    split: str = Field("train", description="Split to train on.")
    eval_split: str | None = Field(None, description="Held-out split.")
    prompt_column: str | None = Field(
        None, description="Column with the question, a text or a list of messages. Unset: prompt, messages, problem or question."
    )
    answer_column: str | None = Field(
        None, description="Column with the answer. Unset: answer, reward_model or the box in solution, where there is one."
    )
    demonstration_column: str | None = Field(
        None, description="Column with a worked completion. Unset: demonstration, completion or solution, where there is one."
    )
    domain_column: str | None = Field(None, description="Column with the domain. Unset: domain, where there is one.")
    system_prompt_column: str | None = Field(
        None, description="Column with a system message by row. Unset: system_prompt, where there is one."
    )


def make(section: Config, *, seed: int) -> Task:
    held_out = _read(section, section.eval_split) if section.eval_split else []
    return split_task(_read(section, section.split), held_out, GRADER.make(section.grader))


def _read(config: Config, split: str) -> list[Problem]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"task.type = \"hub\" needs the hub extra: pip install 'topd[hub]' ({error}).") from error
    try:
        rows = datasets.load_dataset(config.name, config.subset, split=split)
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f'task.name = "{config.name}" (split {split}) cannot be loaded: {first_line(error)}. Check the '
            "name, the split and the network; a local folder of parquet files works without one."
        ) from error
    columns = _columns(config, rows.column_names)
    rows = rows.select_columns(sorted(set(columns.values())))
    floats = {column: FLOATS.get(getattr(feature, "dtype", ""), np.float64) for column, feature in rows.features.items()}
    problems = [
        problem_from(
            {field: as_written(row[column], floats[column]) for field, column in columns.items()},
            f"{config.name}, {split} row {number}",
        )
        for number, row in enumerate(rows)
    ]
    refuse_contradictions(problems)
    return problems


def _columns(config: Config, there: Sequence[str]) -> dict[str, str]:
    """Field of tasks/rows.py -> column that is read as it: the columns that are named, and recognised ones for what is not.

    Other columns are ignored where the question's column is named, or is called `prompt`. Else they may belong to the question
    (choices, a passage), and are refused.
    """
    where = f'task.name = "{config.name}"'
    named = {
        "messages" if config.prompt_column == "messages" else "prompt": config.prompt_column,
        "answer": config.answer_column,
        "demonstration": config.demonstration_column,
        "domain": config.domain_column,
        "system_prompt": config.system_prompt_column,
    }
    columns = {field: column for field, column in named.items() if column is not None}
    if missing := sorted(set(columns.values()) - set(there)):
        raise ConfigError(f"{where} has no column '{missing[0]}'; it has {', '.join(there)}.")
    questions = [config.prompt_column] if config.prompt_column else [name for name in QUESTIONS if name in there]
    if len(questions) != 1:
        several = f"several columns that may be the question: {', '.join(questions)}"
        raise ConfigError(
            f"{where} has {several if questions else 'no column that is known to be the question'}; it has {', '.join(there)}. "
            "Name the columns to read: task.prompt_column, task.answer_column."
        )
    if questions not in ([config.prompt_column], ["prompt"]):
        check_fields(set(there) - set(columns.values()), f"{where} (or name the columns: task.prompt_column)", noun="column")
    alternatives = {"prompt": QUESTIONS, "messages": QUESTIONS, "answer": ANSWERS, "demonstration": DEMONSTRATIONS}
    hidden = {*columns.values(), *columns, *(name for field in columns for name in alternatives.get(field, ()))}
    return columns | {name: name for name in there if name in FIELDS - hidden}


def as_written(value: Any, kind: type[np.floating[Any]] = np.float64) -> Any:
    """A value with its numbers as text. Floats have lost theirs: the shortest decimal of the column's precision stands for it,
    without exponent, and without a fraction for a whole number; NaN is a missing value."""
    match value:
        case float():
            return None if math.isnan(value) else Number(np.format_float_positional(kind(value), trim="-"))
        case int() if not isinstance(value, bool):
            return Number(value)
        case Decimal():
            return Number(format(value, "f"))
        case dict():
            return {name: as_written(item) for name, item in value.items()}
        case list():
            return [as_written(item) for item in value]
    return value
