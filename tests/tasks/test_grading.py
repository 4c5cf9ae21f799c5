"""Answers are found, scored, and never stop a run."""

import pytest

from topd.tasks.grading import Grader, answer_finder, exact, math_verify
from topd.tasks.task import Problem


def problem(answer: str | None) -> Problem:
    return Problem(question="?", answer=answer)


@pytest.mark.parametrize(
    ("pattern", "completion", "found"),
    [
        (None, "all of it", "all of it"),
        (r"answer is (-?\d+)", "the answer is 3, no, the answer is -4.", "-4"),
        (r"([^;]+)$", "1+2=3;3", "3"),
        (r"<answer>(.*?)</answer>", "<answer>two\nlines</answer>", "two\nlines"),
        (r"answer is (-?\d+)", "I do not know", None),
    ],
)
def test_the_last_match_is_the_answer(pattern: str | None, completion: str, found: str | None) -> None:
    assert answer_finder(pattern)(completion) == found


@pytest.mark.parametrize(("answer", "right"), [("12", 1.0), (" 12\n", 1.0), ("12.0", 0.0), ("", 0.0)])
def test_exact(answer: str, right: float) -> None:
    assert exact(answer, problem("12")) == right


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1.0),
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        ("27", r"\boxed{28}", 0.0),
        ("27", "no number at all", 0.0),
        ("0.5", r"\frac{1}{2}", 1.0),  # a bare expression, as task.answer_pattern finds it
        ("B", "B", 1.0),  # not mathematics: to the letter
        ("Yes", "No", 0.0),
    ],
)
def test_math_verify(gold: str, completion: str, right: float) -> None:
    assert math_verify(completion, problem(gold)) == right


def test_a_raising_scorer_gives_zero_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def score(answer: str, of: Problem) -> float:
        if answer == "bad":
            raise ZeroDivisionError("division by zero")
        return 1.0

    grader = Grader(score, None)
    assert [grader.grade(text, problem("1")) for text in ("bad", "good", "bad")] == [0.0, 1.0, 0.0]
    assert grader.num_errors == 2
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


def test_without_a_right_answer_or_without_a_found_one_the_grade_is_zero() -> None:
    grader = Grader(lambda answer, of: 1.0, r"(\d+)")
    assert grader.grade("7", problem(None)) == 0.0
    assert grader.grade("seven", problem("7")) == 0.0
    assert grader.num_errors == 0


def test_grades_are_kept_within_zero_and_one() -> None:
    assert Grader(lambda answer, of: 3.0, None).grade("x", problem("x")) == 1.0
    assert Grader(lambda answer, of: -3.0, None).grade("x", problem("x")) == 0.0


def test_math_verify_works_off_the_main_thread() -> None:
    import threading

    found = []
    thread = threading.Thread(target=lambda: found.append(math_verify(r"\boxed{0.5}", problem("1/2"))))
    thread.start()
    thread.join()
    assert found == [1.0]
