"""A process that grades: reads completions from its input, writes grades to its output, and outlives any answer.

The process imports and warms the scorer once, then forks a child that does the work under limits of time and memory which the
kernel enforces, also inside one long call of C code. A child that dies costs a fork, not a new start.
"""

import contextlib
import dataclasses
import io
import logging
import mmap
import os
import pickle
import resource
import signal
import sys
from typing import Any

from topd.tasks.grading import MAX_ANSWER, SIZE, Grade, Rule
from topd.tasks.task import Problem

CPU_S = 0.8
"""Processor seconds that one completion may take."""
WALL_S = 30.0
"""Seconds that it may take if it uses no processor."""
MEMORY = 4 << 30
"""Bytes of address space that a child may have."""

_ENDED: dict[int, str] = {
    signal.SIGPROF: f"it took more than {CPU_S:g} s to grade",
    signal.SIGALRM: f"it took more than {WALL_S:g} s to grade",
}


def main() -> None:
    requests, replies = 0, os.dup(1)
    os.dup2(2, 1)  # what a scorer prints must not end up among the replies
    logging.disable(logging.CRITICAL)
    rule: Rule = _read(requests)
    with contextlib.suppress(Exception):
        rule.score("x+1", Problem(question="", answer="x+2"))  # a scorer imports its libraries when first used
    taken = mmap.mmap(-1, SIZE.size)  # shared with the child: the number of the request that it took last, 0 before the first
    while True:
        SIZE.pack_into(taken, 0, 0)
        child = os.fork()
        if child == 0:
            _work(rule, requests, replies, taken)
        _, status = os.waitpid(child, 0)
        (number,) = SIZE.unpack(taken)
        if number == 0:
            return  # no more requests, or a child cannot even begin
        _write(replies, (number, Grade(grade=0.0, error=_reason(os.waitstatus_to_exitcode(status)))))


def _reason(code: int) -> str:
    """Why a child ended, by its exit status or minus its signal."""
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return _ENDED.get(-code, f"grading it ended the process ({name})")


def _work(rule: Rule, requests: int, replies: int, taken: mmap.mmap) -> None:
    """Grade until there are no more requests. Never returns."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            number, completion, problem = _read(requests)
        except EOFError:
            os._exit(0)
        SIZE.pack_into(taken, 0, number)
        for timer, seconds in ((signal.ITIMER_PROF, CPU_S), (signal.ITIMER_REAL, WALL_S)):
            signal.setitimer(timer, seconds)  # nobody handles these signals: the kernel ends the child
        extracted = rule.extract(completion)
        # to be shown even if the comparison ends this process; short, so that the pipe takes it whole before a limit can cut it
        _write(replies, (number, extracted and extracted[: MAX_ANSWER + 1]))
        grade = rule.compare(extracted, problem)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        _write(replies, (number, dataclasses.replace(grade, extracted=None)))


def _read(fd: int) -> Any:
    """The next message. Unbuffered, since a child that dies must not take with it what was for the next one."""
    (size,) = SIZE.unpack(_read_exactly(fd, SIZE.size))
    return pickle.loads(_read_exactly(fd, size))


def _read_exactly(fd: int, size: int) -> bytes:
    data = io.BytesIO()
    while data.tell() < size:
        part = os.read(fd, size - data.tell())
        if not part:
            raise EOFError
        data.write(part)
    return data.getvalue()


def _write(fd: int, reply: tuple[int, Grade | str | None]) -> None:
    data = pickle.dumps(reply)
    data = SIZE.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main()
    except (EOFError, BrokenPipeError):  # the other side ended first
        sys.exit(0)
