"""The event loop beside the main thread."""

import asyncio
import threading
import time

import pytest

from tests.serve.serving import wait_until
from topd.endpoint.background import LAST_WORDS, Background, all_or_none


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


def test_what_is_submitted_after_the_end_is_cancelled_at_once(background):
    background.run(asyncio.sleep(0))
    background.close()
    assert background.submit(asyncio.sleep(0)).cancelled()


def test_last_words_are_said_before_the_end(background):
    """What a server must still be told is not cut short by the interrupt that makes it necessary."""
    told = []

    async def tell():
        await asyncio.sleep(0.1)
        told.append("resume")

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.create_task(tell(), name=LAST_WORDS))

    background.submit(work())
    background.run(asyncio.sleep(0.01))
    background.close()
    assert told == ["resume"]


def test_when_one_fails_the_others_are_withdrawn(background):
    told = []

    async def fail():
        await asyncio.sleep(0.01)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        background.run(all_or_none([forever(told), fail()]))
    background.run(asyncio.sleep(0.01))
    assert told == ["began", "cancelled"]


def test_last_words_that_are_being_said_are_not_cut_short(background):
    told = []

    async def tell():
        told.append("began")
        await asyncio.sleep(0.1)
        told.append("resume")

    async def begin():
        background.telling = asyncio.create_task(tell(), name=LAST_WORDS)

    background.run(begin())
    wait_until(lambda: told == ["began"])
    background.close()
    assert told == ["began", "resume"]
