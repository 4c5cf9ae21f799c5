"""An event loop in a background thread, for a program whose main thread computes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

LAST_WORDS = "topd-last-words"
"""Name of tasks that `close` lets finish, up to LAST_WORDS_S seconds: final messages to a server."""

LAST_WORDS_S = 10.0


class Background:
    """Runs coroutines beside the main thread. The thread starts with the first coroutine; `close` cancels those still running."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._closed = False

    def at_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register a coroutine that `close` runs after cancelling all others."""
        self._closers.append(closer)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="topd-endpoint", daemon=True)
            self._thread.start()
        return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start it and return its future. After `close` the future is cancelled from the start."""
        if self._closed:
            work.close()
            refused: Future[T] = Future()
            refused.cancel()
            return refused
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start it and wait. An interrupt of the waiting thread cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all running coroutines and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _wind_up(self) -> None:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            last = {task for task in others if task.get_name() == LAST_WORDS}
            for task in others - last:
                task.cancel()
            await asyncio.wait(others - last or last, timeout=LAST_WORDS_S)
            for task in last if others == last else ():
                task.cancel()
        for closer in self._closers:
            await closer()


async def all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all coroutines, in order. When one fails, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
