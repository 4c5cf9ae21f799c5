"""From a completion to a grade in [0, 1], in worker processes, because one answer can take hours: 10^(10^10).

Nothing here imports torch, so that a worker starts quickly.
"""

import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from topd.errors import RunStopped
from topd.tasks.answers import final_answer
from topd.tasks.task import Problem, Score, Task

_log = logging.getLogger(__name__)

FULL_MARKS = 1.0 - 1e-6
"""A completion is right if its grade reaches this; graders may return fractions."""

MAX_ANSWER = 2_000
"""Characters of an answer that are compared; parsing a longer one costs seconds, and no right answer is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Result of grading one completion."""

    grade: float
    """In [0, 1]; 0 without an answer, without a right one to compare with, and after an error."""
    extracted: str | None = None
    """The answer; from a worker, of one too long to compare only the beginning."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Grading rule of a task. It is sent to worker processes, so `score` must be importable there."""

    score: Score
    answer_pattern: str | None = None
    whole_text: bool = False
    """Without pattern and box the whole completion is the answer, not its last line."""

    def extract(self, completion: str) -> str | None:
        """The answer that is graded; None if the completion gives none."""
        return final_answer(completion, pattern=self.answer_pattern, whole_text=self.whole_text)

    def compare(self, extracted: str | None, problem: Problem) -> Grade:
        """The grade of an answer, in this process: no limit of time or memory. Whatever the scorer raises becomes an error."""
        if extracted is None or problem.answer is None:
            return Grade(grade=0.0, extracted=extracted)
        if len(extracted) > MAX_ANSWER:
            return Grade(grade=0.0, extracted=extracted, error=f"an answer of {len(extracted)} characters")
        try:
            score = float(self.score(extracted, problem))
        except Exception as error:  # any completion may hit any bug of a scorer; it is data, not a crash
            return Grade(grade=0.0, extracted=extracted, error=f"{type(error).__name__}: {error}"[:300])
        return Grade(grade=min(max(score, 0.0), 1.0), extracted=extracted)


class Grader:
    """Grades completions of one task in worker processes with limits. Errors are counted, the first is logged. Close it."""

    def __init__(self, rule: Rule, *, workers: int | None = None) -> None:
        self.rule = rule
        self.num_errors = 0
        self._lock = threading.Lock()
        number = workers or max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="grading")
        self._idle: SimpleQueue[_Worker] = SimpleQueue()

    def submit(self, completion: str, problem: Problem) -> "Future[Grade]":
        """Begin to grade one completion."""
        return self._threads.submit(self._grade, completion, problem)

    def grade(self, completions: Iterable[tuple[str, Problem]]) -> list[Grade]:
        """The grades of several completions, in order."""
        return [graded.result() for graded in [self.submit(*one) for one in completions]]

    def close(self) -> None:
        """Forget what is not graded yet and end the workers."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _grade(self, completion: str, problem: Problem) -> Grade:
        try:
            grade = self._with_worker(self._idle_worker(), completion, problem)
        except WorkerDied:  # killed from outside, perhaps for memory; a new one that dies as well is broken
            grade = self._with_worker(_Worker(self.rule), completion, problem)
        if grade.error is not None:
            with self._lock:
                self.num_errors += 1
                if self.num_errors == 1:
                    _log.warning(
                        "a completion could not be graded (%s; its answer: %.80r): such completions get grade 0 and are counted",
                        grade.error,
                        grade.extracted,
                    )
        return grade

    def _idle_worker(self) -> "_Worker":
        try:
            return self._idle.get_nowait()
        except Empty:
            return _Worker(self.rule)

    def _with_worker(self, worker: "_Worker", completion: str, problem: Problem) -> Grade:
        try:
            grade = worker.grade(completion, problem)
        except BaseException:
            worker.close()
            raise
        self._idle.put(worker)
        return grade


def make_grader(task: Task, answer_pattern: str | None) -> Grader:
    """Grader of a task's completions; close it."""
    return Grader(Rule(score=task.score, answer_pattern=answer_pattern, whole_text=task.whole_text))


class WorkerDied(RunStopped):
    """A grading process ended, which no completion can bring about."""


class _Worker:
    """A process that grades one completion at a time."""

    def __init__(self, rule: Rule) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._connection, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "topd.tasks.grading_worker"],
            stdin=theirs.fileno(),
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for us; a worker ends when its connection does
        )
        theirs.close()
        self._rule = rule
        self._requests = 0
        self.close = weakref.finalize(self, _end, process, self._connection)
        """End the process; at the latest when nobody holds the worker any more."""

    def grade(self, completion: str, problem: Problem) -> Grade:
        try:
            if not self._requests:
                self._connection.send(self._rule)
            self._requests += 1
            self._connection.send((self._requests, completion, problem))
            reply = self._receive()
            if isinstance(reply, Grade):  # extracting the answer took too long
                return reply
            grade: Grade = self._receive()
            return dataclasses.replace(grade, extracted=reply)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerDied(
                "a grading process ended; its own words, if any, stand above. Look at the machine's memory, and try `topd grade`."
            ) from error

    def _receive(self) -> Any:
        """The next reply to the newest request. One to an earlier request, from a child that died idle, is passed over."""
        while True:
            number, reply = self._connection.recv()
            if number == self._requests:
                return reply


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the child that grades
    process.wait()
