"""An event loop whose time passes only while nothing else happens: waiting takes no time, and a deadlock is an error."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Skipping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if found := super().select(0):
            return found
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Skipping) -> None:
        self.clock = selector
        super().__init__(selector)

    def time(self) -> float:
        return self.clock.now


class Clock:
    """`run` a coroutine on it; `monotonic` is its time, to stand in for that of the module `time`."""

    def __init__(self) -> None:
        self._selector = _Skipping()

    def monotonic(self) -> float:
        return self._selector.now

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=lambda: _Loop(self._selector)) as runner:
            return runner.run(work)
