"""No answer can stop, slow or crash a run: limits of time and of one grade."""

import time
from contextlib import closing

import pytest

from tests.tasks.scorers import die
from topd.tasks.grading import MAX_ANSWER, Grade, Grader, Rule
from topd.tasks.scorers import exact, math_verify
from topd.tasks.task import Problem


def problem(answer: str | None) -> Problem:
    return Problem(question="?", answer=answer)


HOSTILE = [
    r"\boxed{10^{10^{10}}}",
    r"\boxed{7^{7^{9}}}",
    r"\boxed{(10^{8})!}",
    r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}",
    "x" * 3_000_000,
]


@pytest.mark.slow
def test_hostile_answers_cost_a_second_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Processor time is what is limited; the clock here is only kept from standing still."""
    with closing(Grader(Rule(score=math_verify), workers=2)) as grader:
        [ready] = grader.grade([("7", problem("8"))])
        began = time.monotonic()
        grades = grader.grade([(text, problem("8")) for text in [*HOSTILE, r"\boxed{8}"]])
        assert time.monotonic() - began < 30
    assert ready.error is None
    assert [grade.grade for grade in grades] == [0.0] * len(HOSTILE) + [1.0]
    assert all(grade.error for grade in grades[:-1])
    assert grades[0].extracted == "10^{10^{10}}"
    assert grader.num_errors == len(HOSTILE)
    assert len(caplog.records) == 1
    assert "10^{10^{10}}" in caplog.text or "took more" in caplog.text or "characters" in caplog.text


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_ever_is_an_error_too() -> None:
    with closing(Grader(Rule(score=exact, answer_pattern=r"(a+)+$"), workers=1)) as grader:
        [graded] = grader.grade([("a" * 40 + "b", problem("a"))])
    assert graded.grade == 0.0
    assert graded.error is not None


def test_a_scorer_that_kills_its_process_costs_one_grade() -> None:
    with closing(Grader(Rule(score=die), workers=1)) as grader:
        grades = grader.grade([("kill", problem("1")), ("", problem("1"))])
    assert "SIGABRT" in (grades[0].error or "")
    assert grades[1] == Grade(grade=0.0)
