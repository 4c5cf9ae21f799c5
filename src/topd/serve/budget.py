"""Memory of requests: bounded for one, and for all that are there at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

from topd.serve.protocol import ApiError

MAX_REQUEST_BYTES = 280_000_000
"""Bytes that the requests which are being read, wait or run may take together, and so may one."""


class Share:
    """What one request takes of a budget."""

    def __init__(self, budget: "Budget") -> None:
        self._budget = budget
        self.num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Take so much in all. Raises ApiError, 413 or 429, if that is too much, alone or beside the others."""
        limit = self._budget.limit
        if num_bytes > limit:
            raise ApiError(413, f"the request would take {num_bytes / 1e6:.0f} MB of memory, more than {limit / 1e6:g}; split it")
        if num_bytes > self.num_bytes and self._budget.taken - self.num_bytes + num_bytes > limit:
            raise ApiError(429, "too many large requests at once; send the request again later", retry_after=1)
        self._budget.taken += num_bytes - self.num_bytes
        self.num_bytes = num_bytes


class Budget:
    """Belongs to one event loop."""

    def __init__(self, limit: int = MAX_REQUEST_BYTES) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A share, which is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.set(0)
