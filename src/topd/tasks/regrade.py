"""`topd grade`: completions of the user's own, graded by a task's rule, before anything is spent."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from topd.config import Config, ReasoningGymConfig
from topd.errors import ConfigError
from topd.tasks.grading import Grade, Grader, Rule
from topd.tasks.load import load_task
from topd.tasks.scorers import SCORERS
from topd.tasks.task import Problem


def grade_rows(config: Config, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """{"extracted", "grade", "error"} of every row, in order.

    A row holds `completion` and `answer`, a string or a number; `question` finds the item of a reasoning_gym task that its scorer
    needs. Raises ConfigError for a row without a completion, or with an answer that is neither.
    """
    items: dict[str, Problem] = {}
    if isinstance(config.task, ReasoningGymConfig):
        task = load_task(config.task, seed=config.run.seed)
        items = {problem.question: problem for problem in [*task.train, *task.held_out]}
        rule = Rule(score=task.score, answer_pattern=config.task.answer_pattern, whole_text=task.whole_text)
    else:  # the data itself is not needed
        rule = Rule(score=SCORERS[config.task.grader], answer_pattern=config.task.answer_pattern)
    with closing(Grader(rule)) as grader:
        pending = [grader.submit(*_completion(row, number, items)) for number, row in enumerate(rows, 1)]
        yield from (_shown(graded.result()) for graded in pending)


def read_rows(lines: Iterable[str], name: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a file of JSON lines; numbers keep their text. Raises ConfigError, naming the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_float=str, parse_int=str)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number}: not JSON ({error}). Every line must be one object.") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, line {number}: every line must be one JSON object, found {type(row).__name__}.")
        yield row


def _completion(row: Mapping[str, Any], number: int, items: Mapping[str, Problem]) -> tuple[str, Problem]:
    completion, answer = row.get("completion"), row.get("answer")
    if not isinstance(completion, str):
        raise ConfigError(
            f'row {number}: needs "completion", a string; found {completion!r:.80}. Rows are {{"answer", "completion"}}.'
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ConfigError(f'row {number}: "answer" must be a string or a number, found {type(answer).__name__}.')
    text = None if answer is None or not str(answer).strip() else str(answer)
    item = items.get(str(row.get("question")))
    return completion, item if item is not None else Problem(question=str(row.get("question") or ""), answer=text)


def _shown(grade: Grade) -> dict[str, Any]:
    return {"extracted": grade.extracted, "grade": grade.grade, "error": grade.error}
