"""The event loop beside the main thread."""

import asyncio
import threading
import time

import pytest

from tests.serve.serving import wait_until
from topd.endpoint.background import Background


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


def names():
    return [thread.name for thread in threading.enumerate()]


async def forever(told):
    told.append("began")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        told.append("cancelled")
        raise


def test_there_is_no_thread_before_there_is_work(background):
    assert "topd-endpoint" not in names()
    background.close()


def test_results_and_errors_come_back(background):
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x

    async def fail():
        raise KeyError("x")

    assert background.run(double(4)) == 8
    futures = [background.submit(double(x)) for x in range(20)]
    assert [future.result() for future in futures] == list(range(0, 40, 2))
    with pytest.raises(KeyError):
        background.run(fail())


def test_an_interrupt_of_the_waiting_thread_cancels_the_work(background, monkeypatch):
    told = []

    class Interrupt(BaseException):
        pass

    def interrupted(future, timeout=None):
        wait_until(lambda: told == ["began"])
        raise Interrupt

    from concurrent.futures import Future

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(Interrupt):
            background.run(forever(told))
    wait_until(lambda: told == ["began", "cancelled"])


def test_close_cancels_all_that_runs_and_ends_the_thread(background):
    told = []
    futures = [background.submit(forever(told)) for _ in range(3)]
    wait_until(lambda: len(told) == 3)
    start = time.monotonic()
    background.close()
    assert time.monotonic() - start < 2
    assert told[3:] == ["cancelled"] * 3
    assert all(future.cancelled() for future in futures)
    assert "topd-endpoint" not in names()
    background.close()
