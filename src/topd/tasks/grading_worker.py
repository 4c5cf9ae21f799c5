"""A process that grades: its standard input is a connection that brings completions and takes grades. It outlives any answer.

It warms the scorer, then forks a child that grades under the kernel's limits of time and memory. A child that dies costs a fork.
"""

import contextlib
import dataclasses
import logging
import mmap
import os
import resource
import signal
import struct
import sys
from multiprocessing.connection import Connection

from topd.tasks.grading import MAX_ANSWER, Grade, Rule
from topd.tasks.task import Problem

CPU_S = 0.8
"""Processor seconds that one completion may take."""
WALL_S = 30.0
"""Seconds that it may take if it uses no processor."""
MEMORY = 4 << 30
"""Bytes of address space that a child may have."""

NUMBER = struct.Struct("I")

_ENDED: dict[int, str] = {
    signal.SIGPROF: f"it took more than {CPU_S:g} s to grade",
    signal.SIGALRM: f"it took more than {WALL_S:g} s to grade",
}


def main() -> None:
    connection: Connection = Connection(os.dup(0))
    os.dup2(2, 1)  # a scorer may print
    logging.disable(logging.CRITICAL)
    rule: Rule = connection.recv()
    with contextlib.suppress(Exception):
        rule.score("x+1", Problem(question="", answer="x+2"))  # a scorer imports its libraries when first used
    taken = mmap.mmap(-1, NUMBER.size)  # shared with the child: the number of the request that it took last, 0 before the first
    while True:
        NUMBER.pack_into(taken, 0, 0)
        child = os.fork()
        if child == 0:
            _work(rule, connection, taken)
        _, status = os.waitpid(child, 0)
        (number,) = NUMBER.unpack(taken)
        if number == 0:
            return  # no more requests, or a child cannot even begin
        connection.send((number, Grade(grade=0.0, error=_reason(os.waitstatus_to_exitcode(status)))))


def _reason(code: int) -> str:
    """Why a child ended, by its exit status or minus its signal."""
    name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return _ENDED.get(-code, f"grading it ended the process ({name})")


def _work(rule: Rule, connection: Connection, taken: mmap.mmap) -> None:
    """Grade until there are no more requests. Never returns."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            number, completion, problem = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        NUMBER.pack_into(taken, 0, number)
        for timer, seconds in ((signal.ITIMER_PROF, CPU_S), (signal.ITIMER_REAL, WALL_S)):
            signal.setitimer(timer, seconds)  # nobody handles these signals: the kernel ends the child
        extracted = rule.extract(completion)
        # to be shown even if the comparison ends this process; short, so that it is sent whole before a limit can cut it
        connection.send((number, extracted and extracted[: MAX_ANSWER + 1]))
        grade = rule.compare(extracted, problem)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        connection.send((number, dataclasses.replace(grade, extracted=None)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main()
    except (EOFError, ConnectionError):  # the other side ended first
        sys.exit(0)
