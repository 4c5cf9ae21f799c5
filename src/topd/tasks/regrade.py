"""`topd grade`: completions of the user's own, graded by a task's rule, before anything is spent."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from topd.config import Config, GradedTaskConfig
from topd.errors import ConfigError
from topd.plugins import GRADER
from topd.tasks.grading import Grade, Grader, Rule
from topd.tasks.jsonl import parse_row
from topd.tasks.rows import ANSWERS, Number, answer_from
from topd.tasks.task import Problem, make_task


def grade_rows(config: Config, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """{"extracted", "grade", "error"} of every row, in order.

    A row holds `completion` and `answer`, a string or a number, or what stands for an answer in training data (tasks/rows.py);
    `question` finds the item of a task whose own scorer needs it. Raises ConfigError for a row without a completion or
    an answer's field, or with an answer that is neither.
    """
    items: dict[str, Problem] = {}
    if isinstance(config.task, GradedTaskConfig):  # the data itself is not needed
        rule = Rule(score=GRADER.make(config.task.grader), answer_pattern=config.task.answer_pattern)
    else:
        task = make_task(config.task, seed=config.run.seed)
        items = {problem.question: problem for problem in [*task.train, *task.held_out]}
        rule = Rule(score=task.score, answer_pattern=config.task.answer_pattern, whole_text=task.whole_text)
    with closing(Grader(rule)) as grader:
        pending = [_graded(grader, row, f"row {number}", items) for number, row in enumerate(rows, 1)]
        yield from (_shown(graded.result()) for graded in pending)


def read_rows(lines: Iterable[str], name: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a file of JSON lines; numbers keep their text. Raises ConfigError, naming the line."""
    return (parse_row(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip())


def _graded(grader: Grader, row: Any, where: str, items: Mapping[str, Problem]) -> "Future[Grade]":
    """A row on its way; what is to be graded is read as training data are."""
    completion = row.get("completion") if isinstance(row, Mapping) else None
    if not isinstance(completion, str):
        raise ConfigError(
            f'{where}: needs "completion", a string; found {completion!r:.80}. Rows are {{"answer", "completion"}}.'
        )
    fields = {key: Number(value) if type(value) in (int, float) else value for key, value in row.items() if value is not None}
    if not row.keys() & {*ANSWERS, "solution"}:
        raise ConfigError(f'{where}: needs "answer", as in training data; found {", ".join(map(repr, row))}.')
    answer, _ = answer_from(fields, where)
    item = items.get(str(row.get("question")))
    if item is None and answer is None:
        extracted = grader.rule.extract(completion)
        done: Future[Grade] = Future()
        done.set_result(Grade(grade=0.0, extracted=extracted, error="there is no answer to grade against"))
        return done
    return grader.submit(completion, item or Problem(question=str(row.get("question") or ""), answer=answer))


def _shown(grade: Grade) -> dict[str, Any]:
    return {"extracted": grade.extracted, "grade": grade.grade, "error": grade.error}
