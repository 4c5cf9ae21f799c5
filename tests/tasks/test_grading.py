"""Errors of scorers are counted, and grades stay between 0 and 1."""

from contextlib import closing

import pytest

from tests.tasks.scorers import picky
from topd.tasks.grading import Grade, Grader, Rule
from topd.tasks.task import Problem


def problem(answer: str | None) -> Problem:
    return Problem(question="?", answer=answer)


def test_a_raising_scorer_gives_zero_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Grader(Rule(score=picky), workers=1)) as grader:
        grades = grader.grade([(text, problem("1")) for text in ("bad", "good", "bad")])
    assert [grade.grade for grade in grades] == [0.0, 1.0, 0.0]
    assert grader.num_errors == 2
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


def test_without_a_right_answer_or_without_an_extracted_one_the_grade_is_zero() -> None:
    rule = Rule(score=picky, answer_pattern=r"(\d+)")
    assert rule.compare(rule.extract("7"), problem(None)) == Grade(grade=0.0, extracted="7")
    assert rule.compare(rule.extract("seven"), problem("7")) == Grade(grade=0.0)


def test_grades_are_kept_within_zero_and_one() -> None:
    rule = Rule(score=picky)
    assert [rule.compare(text, problem("x")).grade for text in ("three", "minus")] == [1.0, 0.0]
