"""Replicas of one server behind one function: send a request, get a checked answer, whatever one of them does.

The replica with the fewest outstanding requests is asked. What fails is retried with jitter, elsewhere if there is an elsewhere.
A replica that fails repeatedly, refuses what others accept, or answers as another model, gets nothing more until a health check
takes it back.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, OtherModel, Refused, Unavailable
from topd.endpoint.replica import Replica, Request

T = TypeVar("T")

FAILURES_TO_OPEN = 3
"""Failures in a row after which a replica is left alone."""

LOOK_AGAIN_S = 1.0
"""How often a waiting request looks whether its patience is at an end."""

LARGE_ANSWER = 1 << 18
"""Bytes from which an answer is read beside the event loop."""

log = logging.getLogger("topd.endpoint")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    """A request on its way: how it is made and read, and what became of it, by URL."""

    make: Callable[[], Request]
    read: Callable[[httpx2.Response], T]
    began: float
    failures: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, Refused] = field(default_factory=dict)


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

    async def send(self, make: Callable[[], Request], read: Callable[[httpx2.Response], T]) -> T:
        """The answer as `read` makes it out of a response; `read` raises BadAnswer for one that cannot be used.

        `make` builds the request once there is a place for it. Raises the last Fault once the request has failed too often, all
        replicas refuse it, or nothing has succeeded for too long.
        """
        job = _Job(make, read, time.monotonic())
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.max_attempts),
            wait=wait_random_exponential(multiplier=0.2, max=self.longest_wait_s),
            retry=retry_if_exception_type((Unavailable, BadAnswer)),
            before_sleep=self._note_retry,
            reraise=True,
        )
        return await attempts(self._attempt, job)

    async def _attempt(self, job: "_Job[T]") -> T:
        """One try that counts. Being asked to wait does not count, nor a refusal while others may accept."""
        while True:
            replica = await self._choose(job)
            try:
                self.num_requests += 1
                response = await replica.send(job.make())
                large = len(response.content) > LARGE_ANSWER
                answer = await asyncio.to_thread(job.read, response) if large else job.read(response)
            except Busy as busy:
                replica.not_before, replica.busy = time.monotonic() + busy.seconds, busy
                self._check_patience(job, busy)
            except Forbidden:
                raise
            except Refused as refusal:
                job.refusals[replica.url] = refusal
            except (Unavailable, BadAnswer) as fault:
                job.failures[replica.url] += 1
                self._failed(replica, fault)
                raise
            else:
                self._succeeded(replica, job)
                return answer
            finally:
                await self._release(replica)

    async def _choose(self, job: "_Job[T]") -> Replica:
        """Take a place, as soon as one is free: where this request failed least, and of those where there is least to do.

        Raises Refused if no replica can be expected to answer.
        """
        async with self._changed:
            while True:
                now = time.monotonic()
                able = [r for r in self.replicas if r.trusted and r.url not in job.refusals]
                free = [r for r in able if r.outstanding < self.max_concurrent and r.not_before <= now]
                if free:
                    replica = min(free, key=lambda r: (job.failures[r.url], r.outstanding))
                    replica.outstanding += 1
                    return replica
                if not able:
                    self._check_any(job)
                waiting = [r.busy for r in able if r.not_before > now and r.busy is not None]
                if waiting and len(waiting) == len(able):
                    self._check_patience(job, waiting[0])
                waits = [r.not_before - now for r in able if r.not_before > now]
                await self._wait(min([LOOK_AGAIN_S, *waits]))

    async def _wait(self, seconds: float) -> None:
        """Until something has changed, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _check_any(self, job: "_Job[T]") -> None:
        """Raise if no replica can be expected to answer."""
        if job.refusals and all(r.url in job.refusals for r in self.replicas if r.trusted):
            raise next(iter(job.refusals.values()))
        reasons = "; ".join(dict.fromkeys(str(replica.fault) for replica in self.replicas))
        if all(replica.is_another_model for replica in self.replicas):
            raise Refused(reasons)
        self._check_patience(job, Unavailable(reasons))

    def _check_patience(self, job: "_Job[T]", fault: Fault) -> None:
        if time.monotonic() - max(job.began, self._last_success) > self.patience_s:
            raise Refused(f"nothing succeeded for {self.patience_s:g} s: {fault}") from fault

    async def _release(self, replica: Replica) -> None:
        async with self._changed:
            replica.outstanding -= 1
            self._changed.notify(1)

    def _succeeded(self, replica: Replica, job: "_Job[T]") -> None:
        """A replica that refused what this one accepts has failed."""
        replica.failures = 0
        self._last_success = time.monotonic()
        for other in self.replicas:
            if other.url in job.refusals:
                self._failed(other, job.refusals[other.url])

    def _failed(self, replica: Replica, fault: Fault) -> None:
        replica.failures += 1
        if replica.trusted and (replica.failures >= FAILURES_TO_OPEN or isinstance(fault, OtherModel)):
            self.distrust(replica, fault)

    def distrust(self, replica: Replica, fault: Fault) -> None:
        """Send nothing more to a replica until its health check succeeds."""
        replica.fault = fault
        log.warning("%s is left alone until it is well again: %s", replica.url, fault)
        self._health[replica.url] = asyncio.create_task(self._readmit(replica))

    async def _readmit(self, replica: Replica) -> None:
        """Check a replica's health, more and more rarely, until it is well."""
        pause = 0.25
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.longest_wait_s)
            try:
                async with asyncio.timeout(replica.timeout_s):
                    await self.verify(replica)
                break
            except TimeoutError:
                replica.fault = Unavailable(f"{replica.url} did not pass its health check within {replica.timeout_s:g} s")
            except Fault as fault:
                replica.fault, replica.is_another_model = fault, isinstance(fault, OtherModel)
            except Exception as error:  # whatever it is, the replica must be looked at again
                log.exception("the health check of %s failed", replica.url)
                replica.fault = Unavailable(f"{replica.url}: {error}")
        log.warning("%s is back", replica.url)
        async with self._changed:
            replica.fault, replica.failures, replica.is_another_model = None, 0, False
            self._changed.notify_all()

    async def wait_for_one(self) -> None:
        """Until some replica is trusted. Raises Unavailable if none is for `patience_s`."""
        end = time.monotonic() + self.patience_s
        async with self._changed:
            while not any(replica.trusted for replica in self.replicas):
                if time.monotonic() > end:
                    reasons = "; ".join(dict.fromkeys(str(replica.fault) for replica in self.replicas))
                    raise Unavailable(f"no server has come back for {self.patience_s:g} s: {reasons}")
                await self._wait(LOOK_AGAIN_S)

    def _note_retry(self, state: RetryCallState) -> None:
        self.num_retries += 1
        if state.outcome is not None:
            log.info("attempt %d failed: %s", state.attempt_number, state.outcome.exception())

    async def close(self) -> None:
        for task in self._health.values():
            task.cancel()
        for replica in self.replicas:
            await replica.close()
