"""Sampling the next step's rollouts while this one trains (rollout.max_lag = 1)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from topd.types import RolloutGroup

Work = Callable[[], list[RolloutGroup]]


class Ahead:
    """At most one step is sampled ahead, in a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="topd-ahead")
        self._step = 0
        self._future: Future[list[RolloutGroup]] | None = None

    def start(self, step: int, work: Work) -> None:
        """Begin with that step's rollouts."""
        self._step, self._future = step, self._executor.submit(work)

    def take(self, step: int) -> list[RolloutGroup] | None:
        """Wait for that step's rollouts; None if they were not begun. Raises what sampling raised."""
        if self._future is None or self._step != step:
            return None
        future, self._future = self._future, None
        return future.result()

    def wait(self) -> None:
        """Until nothing is being sampled, so that weights may change."""
        if self._future is not None:
            self._future.exception()
