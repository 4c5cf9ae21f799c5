"""One step is sampled ahead, in a thread of its own."""

import threading

import pytest

from topd.errors import RunStopped
from topd.rollout.ahead import Ahead


def test_what_was_begun_is_taken_once_and_by_its_step_alone():
    ahead = Ahead()
    assert ahead.take(1) is None
    groups = []
    ahead.start(2, lambda: groups)
    assert ahead.take(1) is None
    assert ahead.take(3) is None
    assert ahead.take(2) is groups
    assert ahead.take(2) is None


def test_it_runs_beside_the_caller_and_wait_waits_for_it():
    ahead, go, done = Ahead(), threading.Event(), []

    def work():
        assert go.wait(10)
        done.append(threading.current_thread().name)
        return []

    ahead.wait()
    ahead.start(2, work)
    assert not done
    go.set()
    ahead.wait()
    assert done[0].startswith("topd-ahead")
    assert ahead.take(2) == []


def test_an_error_is_raised_by_take_not_by_wait():
    def fail():
        raise RunStopped("the servers are gone")

    ahead = Ahead()
    ahead.start(2, fail)
    ahead.wait()
    with pytest.raises(RunStopped, match="the servers are gone"):
        ahead.take(2)
