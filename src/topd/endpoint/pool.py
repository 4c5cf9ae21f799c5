"""Replicas of one server behind one function: send a request, get a checked answer, whatever one of them does.

The replica with the fewest outstanding requests is asked. What fails is retried with jitter, elsewhere if there is an elsewhere.
A replica that fails repeatedly, or answers as another model, gets nothing more until a health check takes it back.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, OtherModel, Refused, Unavailable
from topd.endpoint.replica import Replica, Request

T = TypeVar("T")

FAILURES_TO_OPEN = 3
"""Failures in a row after which a replica is left alone."""

HEALTH_TIMEOUT_S = 30.0

log = logging.getLogger("topd.endpoint")


class Pool:
    """All methods belong to one event loop.

    `verify` asks a replica for what proves that it is alive and the right model; it raises a Fault otherwise. `patience_s`: how
    long nothing at all may succeed before a request is given up. `max_attempts`: how often one request may fail.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        verify: Callable[[Replica], Awaitable[None]],
        max_concurrent: int,
        max_attempts: int,
        patience_s: float,
        longest_wait_s: float = 15.0,
    ) -> None:
        self.replicas = list(replicas)
        self.verify = verify
        self.max_concurrent = max_concurrent
        self.max_attempts = max_attempts
        self.patience_s = patience_s
        self.longest_wait_s = longest_wait_s
        self.num_requests = 0
        self.num_retries = 0
        self._last_success = 0.0
        self._changed = asyncio.Condition()
        self._health: dict[str, asyncio.Task[None]] = {}

    async def send(
        self, request: Request, read: Callable[[httpx2.Response], T], *, check: Callable[[Replica], Awaitable[None]] | None = None
    ) -> T:
        """The answer as `read` makes it out of a response; `read` raises BadAnswer for one that cannot be used.

        `check` may then ask more of the replica that answered, and raise a Fault. Raises the last Fault once the request has
        failed too often, or nothing has succeeded for too long.
        """
        began = time.monotonic()
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.max_attempts),
            wait=wait_random_exponential(multiplier=0.2, max=self.longest_wait_s),
            retry=retry_if_exception_type((Unavailable, BadAnswer)),
            before_sleep=self._note_retry,
            reraise=True,
        )
        return await attempts(self._attempt, request, read, check, began, Counter())

    async def _attempt(
        self,
        request: Request,
        read: Callable[[httpx2.Response], T],
        check: Callable[[Replica], Awaitable[None]] | None,
        began: float,
        failures: Counter[str],
    ) -> T:
        """One try that counts. Being asked to wait does not count. `failures` of this request, by URL."""
        while True:
            replica = await self._choose(began, failures)
            try:
                self.num_requests += 1
                answer = read(await replica.send(request))
                if check is not None:
                    await check(replica)
            except Busy as busy:
                replica.not_before = time.monotonic() + busy.seconds
                self._check_patience(began, busy)
            except (Unavailable, BadAnswer) as fault:
                failures[replica.url] += 1
                self._failed(replica, fault)
                raise
            else:
                replica.failures = 0
                self._last_success = time.monotonic()
                return answer
            finally:
                await self._release(replica)

    async def _choose(self, began: float, failures: Counter[str]) -> Replica:
        """Take a place, as soon as one is free: where this request failed least, and of those where there is least to do.

        Raises Refused if no replica can be expected to answer.
        """
        async with self._changed:
            while True:
                now = time.monotonic()
                free = [r for r in self.replicas if r.trusted and r.outstanding < self.max_concurrent and r.not_before <= now]
                if free:
                    replica = min(free, key=lambda r: (failures[r.url], r.outstanding))
                    replica.outstanding += 1
                    return replica
                self._check_any(began)
                waits = [r.not_before - now for r in self.replicas if r.not_before > now]
                try:
                    async with asyncio.timeout(min([1.0, *waits])):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def _check_any(self, began: float) -> None:
        """Raise if no replica can be expected to answer."""
        if any(replica.trusted for replica in self.replicas):
            return
        reasons = "; ".join(dict.fromkeys(replica.reason for replica in self.replicas))
        if all("another model" in replica.reason for replica in self.replicas):
            raise Refused(reasons)
        self._check_patience(began, Unavailable(reasons))

    def _check_patience(self, began: float, fault: Fault) -> None:
        if time.monotonic() - max(began, self._last_success) > self.patience_s:
            raise Refused(f"nothing succeeded for {self.patience_s:g} s: {fault}") from fault

    async def _release(self, replica: Replica) -> None:
        async with self._changed:
            replica.outstanding -= 1
            self._changed.notify_all()

    def _failed(self, replica: Replica, fault: Fault) -> None:
        replica.failures += 1
        if replica.trusted and (replica.failures >= FAILURES_TO_OPEN or isinstance(fault, OtherModel)):
            self.distrust(replica, fault)

    def distrust(self, replica: Replica, fault: Fault) -> None:
        """Send nothing more to a replica until its health check succeeds."""
        replica.trusted, replica.reason = False, str(fault)
        log.warning("%s is left alone until it is well again: %s", replica.url, fault)
        self._health[replica.url] = asyncio.create_task(self._readmit(replica))

    async def _readmit(self, replica: Replica) -> None:
        """Check a replica's health, more and more rarely, until it is well."""
        pause = 0.25
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.longest_wait_s)
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self.verify(replica)
                break
            except (Fault, TimeoutError) as fault:
                replica.reason = str(fault) or f"{replica.url} did not answer its health check"
                if isinstance(fault, Forbidden):
                    log.warning("%s", fault)
        log.warning("%s is back", replica.url)
        async with self._changed:
            replica.trusted, replica.failures, replica.reason = True, 0, ""
            self._changed.notify_all()

    def _note_retry(self, state: RetryCallState) -> None:
        self.num_retries += 1
        if state.outcome is not None:
            log.info("attempt %d failed: %s", state.attempt_number, state.outcome.exception())

    async def close(self) -> None:
        for task in self._health.values():
            task.cancel()
        for replica in self.replicas:
            await replica.close()
