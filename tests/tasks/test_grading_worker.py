"""No answer and no scorer can stop, slow or crash a run: limits of time, of memory and of one grade."""

import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.tasks.scorers import misbehave
from topd.tasks.grading import MAX_ANSWER, Grade, Grader, Rule, WorkerDied, _Worker
from topd.tasks.scorers import exact, math_verify
from topd.tasks.task import Problem


def problem(answer: str | None = "1") -> Problem:
    return Problem(question="?", answer=answer)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """One worker whose scorer does what the answer says."""
    with closing(Grader(Rule(score=misbehave), workers=1)) as grader:
        yield grader


def grades(grader: Grader, *answers: str) -> list[Grade]:
    return grader.grade([(answer, problem()) for answer in answers])


TIME = "it took more than 0.8 s to grade"
HOSTILE = {
    r"\boxed{10^{10^{10}}}": TIME,
    r"\boxed{(10^{8})!}": TIME,
    r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}": TIME,
    r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}": "an answer of 2001 characters",
    "x" * 3_000_000: "an answer of 3000000 characters",
}


@pytest.mark.slow
def test_hostile_answers_cost_a_second_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """From any thread. Processor time is what is limited; the clock here is only kept from standing still."""
    texts = [*HOSTILE, r"\boxed{8}"]
    with closing(Grader(Rule(score=math_verify), workers=1)) as grader, ThreadPoolExecutor(1) as other:
        began = time.monotonic()
        graded = other.submit(grader.grade, [(text, problem("8")) for text in texts]).result()
        assert time.monotonic() - began < 30
    assert [grade.error for grade in graded] == [*HOSTILE.values(), None]
    assert [grade.grade for grade in graded] == [0.0] * len(HOSTILE) + [1.0]
    assert graded[0].extracted == "10^{10^{10}}"
    assert grader.num_errors == len(HOSTILE)
    assert caplog.messages == [
        f"a completion could not be graded ({TIME}; its answer: '10^{{10^{{10}}}}'): such completions get grade 0 and are counted"
    ]


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_ever_is_an_error_too() -> None:
    with closing(Grader(Rule(score=exact, answer_pattern=r"(a+)+$"), workers=1)) as grader:
        [graded] = grader.grade([("a" * 40 + "b", problem("a"))])
    assert graded == Grade(grade=0.0, error=TIME)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("sleep", "it took more than 30 s to grade"),
        ("allocate", "MemoryError: "),
        ("abort", "grading it ended the process (SIGABRT)"),
        ("exit", "grading it ended the process (exit status 3)"),
        ("limits", "RuntimeError: 0.8 30"),
    ],
)
def test_what_a_scorer_does_costs_one_grade(grader: Grader, answer: str, error: str) -> None:
    assert grades(grader, answer, "good") == [Grade(grade=0.0, extracted=answer, error=error), Grade(grade=1.0, extracted="good")]


def test_time_between_two_completions_is_not_counted(grader: Grader) -> None:
    assert [grade.grade for grade in grades(grader, "hurry")] == [1.0]
    time.sleep(0.15)
    assert [grade.error for grade in grades(grader, "good")] == [None]


def test_a_process_that_is_killed_while_idle_costs_no_grade_and_shifts_none(grader: Grader) -> None:
    [said] = grades(grader, "processes")
    child = int((said.error or "").split()[-1])
    with pytest.raises(ProcessLookupError):  # gone, and its parent knows
        while True:
            os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
    assert [grade.error for grade in grades(grader, "good", "abort", "good")] == [
        None,
        "grading it ended the process (SIGABRT)",
        None,
    ]


def test_a_worker_whose_parent_is_killed_goes_on_until_it_dies_and_is_replaced(grader: Grader) -> None:
    graded = grades(grader, "kill parent", "good", "abort", "good")
    assert [grade.grade for grade in graded] == [1.0, 1.0, 0.0, 1.0]
    assert graded[2].error == "grading it ended the process (SIGABRT)"


def test_a_worker_that_dies_is_replaced_once(grader: Grader, tmp_path: Path) -> None:
    once = Problem(question="?", answer=str(tmp_path / "done"))
    assert grader.grade([("kill all once", once)]) == [Grade(grade=1.0, extracted="kill all once")]
    before = grader.num_errors
    with pytest.raises(WorkerDied, match=r"a grading process ended.*`topd grade`"):
        grades(grader, "kill all")
    assert grader.num_errors == before
    assert [grade.grade for grade in grades(grader, "good")] == [1.0]


def test_when_all_workers_are_killed_new_ones_take_over() -> None:
    with closing(Grader(Rule(score=misbehave), workers=2)) as grader:
        workers = {int((grade.error or "").split()[-2]) for grade in grades(grader, "processes", "processes")}
        assert len(workers) == 2
        for worker in workers:
            os.killpg(worker, signal.SIGKILL)
        assert [grade.grade for grade in grades(grader, "good")] == [1.0]


def test_of_an_answer_too_long_to_compare_only_the_beginning_comes_back(grader: Grader) -> None:
    """Megabytes would fill the pipe, where the limit of time could cut them in two."""
    [graded] = grades(grader, "x" * 1_000_000)
    assert graded == Grade(grade=0.0, extracted="x" * (MAX_ANSWER + 1), error="an answer of 1000000 characters")


def frame(message: object) -> bytes:
    data = pickle.dumps(message)
    return struct.pack("!i", len(data)) + data


WHOLE = frame((1, "answer"))


@pytest.mark.parametrize(
    "replies",
    [b"", WHOLE[:2], WHOLE[:4], WHOLE[:9], WHOLE, struct.pack("!i", 4) + b"junk"],
    ids=lambda replies: str(len(replies)),
)
def test_a_broken_reply_is_a_worker_that_died(replies: bytes) -> None:
    """Bytes of a worker that ended within its replies."""
    worker = object.__new__(_Worker)
    ours, theirs = socket.socketpair()
    with theirs, closing(Connection(ours.detach())) as connection:
        theirs.sendall(replies)
        theirs.shutdown(socket.SHUT_WR)
        worker._connection, worker._rule, worker._requests = connection, None, 0
        with pytest.raises(WorkerDied):
            worker.grade("answer", problem())


def test_closing_ends_the_processes() -> None:
    with closing(Grader(Rule(score=misbehave), workers=1)) as grader:
        [said] = grades(grader, "processes")
        parent = int((said.error or "").split()[-2])
        os.kill(parent, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(parent, 0)
