"""math-verify is given the right answer first: an interval may stand for an inequality that was asked for, not the reverse."""

import pytest

from topd.tasks.scorers import math_verify
from topd.tasks.task import Problem


@pytest.mark.parametrize(
    ("gold", "answer", "grade"),
    [
        ("x > 5", r"(5, \infty)", 1.0),
        (r"(5, \infty)", "x > 5", 0.0),
        (r"x \leq 5", r"(-\infty, 5]", 1.0),
        (r"(-\infty, 5]", r"x \leq 5", 0.0),
    ],
)
def test_the_two_sides_are_not_exchanged(gold: str, answer: str, grade: float) -> None:
    assert math_verify(answer, Problem(question="", answer=gold)) == grade
