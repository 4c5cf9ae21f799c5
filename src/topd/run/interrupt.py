"""Ctrl-C, SIGTERM and a closed terminal: an exception at any point, except inside blocks that must run as a whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user or the machine asked the run to stop."""


def stopping_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


@contextmanager
def handling(stop: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, the stopping signals call `stop`; outside, handlers are as before. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, stop) for signum in stopping_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def interruptible() -> AbstractContextManager[None]:
    """Inside, the stopping signals raise `Interrupted`."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(signum).name)

    return handling(stop)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, signals are deferred to the end of the block. Blocks may nest."""
    waiting: list[int] = []
    with handling(lambda signum, frame: waiting.append(signum)):
        yield
    if waiting:
        signal.raise_signal(waiting[0])
