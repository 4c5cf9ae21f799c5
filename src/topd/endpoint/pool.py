"""Replicas of one server behind one function: send a request, get a checked answer, even if some replicas fail.

Each request goes to the replica with the fewest outstanding requests. Failed requests are retried with jitter, on another replica
if there is one. A replica that fails repeatedly, refuses what others accept, or answers as another model is unhealthy: it gets no
requests until its health check passes.
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

from topd.config import EndpointConfig
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, OtherModel, Refused, Unavailable
from topd.endpoint.replica import Replica, Request

T = TypeVar("T")

FAILURES_TO_OPEN = 3
"""Consecutive failures after which a replica is unhealthy."""

LOOK_AGAIN_S = 1.0
"""Interval at which a waiting request checks its time limit."""

LARGE_ANSWER = 1 << 18
"""Bytes from which an answer is parsed in a thread, not in the event loop."""

log = logging.getLogger("topd.endpoint")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    """A request in progress: its builder and reader, and its failures and refusals by URL."""

    make: Callable[[], Request]
    read: Callable[[httpx2.Response], T]
    began: float
    failures: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, Refused] = field(default_factory=dict)


class Pool:
    """Pool of replicas; all methods belong to one event loop.

    `verify` raises a Fault unless a replica is alive and serves the right model. `patience_s`: seconds without any success after
    which a request fails. `max_attempts`: failures allowed per request.
    """

    def __init__(
        self,
        section: EndpointConfig,
        replicas: Sequence[Replica],
        *,
        verify: Callable[[Replica], Awaitable[None]],
        longest_wait_s: float = 15.0,
    ) -> None:
        self.section = section
        self.replicas = list(replicas)
        self.verify = verify
        self.longest_wait_s = longest_wait_s
        self.num_requests = 0
        self.num_retries = 0
        self._last_success = 0.0
        self._changed = asyncio.Condition()
        self._health: dict[str, asyncio.Task[None]] = {}

    async def send(self, make: Callable[[], Request], read: Callable[[httpx2.Response], T]) -> T:
        """Send a request and return its answer as parsed by `read`, which raises BadAnswer for an invalid one.

        `make` builds the request once a replica is free. Raises the last Fault once the request has failed too often, all
        replicas refuse it, or nothing has succeeded for `patience_s`.
        """
        job = _Job(make, read, time.monotonic())
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.section.max_attempts),
            wait=wait_random_exponential(multiplier=0.2, max=self.longest_wait_s),
            retry=retry_if_exception_type((Unavailable, BadAnswer)),
            before_sleep=self._note_retry,
            reraise=True,
        )
        return await attempts(self._attempt, job)

    async def _attempt(self, job: "_Job[T]") -> T:
        """Make one attempt. A request to wait does not count as one, nor a refusal while other replicas may accept."""
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
        """Wait for a free replica and reserve it: the one with fewest failures of this request, then with fewest requests.

        Raises Refused if no replica can be expected to answer.
        """
        async with self._changed:
            while True:
                now = time.monotonic()
                able = [r for r in self.replicas if r.trusted and r.url not in job.refusals]
                free = [r for r in able if r.outstanding < self.section.max_concurrent_requests and r.not_before <= now]
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
        """Wait for a change of state, at most `seconds`."""
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
        if time.monotonic() - max(job.began, self._last_success) > self.section.patience_s:
            raise Refused(f"nothing succeeded for {self.section.patience_s:g} s: {fault}") from fault

    async def _release(self, replica: Replica) -> None:
        async with self._changed:
            replica.outstanding -= 1
            self._changed.notify(1)

    def _succeeded(self, replica: Replica, job: "_Job[T]") -> None:
        """Record a success, and a failure of every replica that refused the same request."""
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
        """Send no more requests to a replica until its health check passes."""
        replica.fault = fault
        log.warning("%s marked unhealthy, no requests until its health check passes: %s", replica.url, fault)
        self._health[replica.url] = asyncio.create_task(self._readmit(replica))

    async def _readmit(self, replica: Replica) -> None:
        """Repeat a replica's health check with growing pauses until it passes."""
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
            except Exception as error:  # an unexpected error must not end the health checks
                log.exception("the health check of %s failed", replica.url)
                replica.fault = Unavailable(f"{replica.url}: {error}")
        log.warning("%s is healthy again", replica.url)
        async with self._changed:
            replica.fault, replica.failures, replica.is_another_model = None, 0, False
            self._changed.notify_all()

    async def wait_for_one(self) -> None:
        """Wait until some replica is trusted. Raises Unavailable if none is for `patience_s`."""
        end = time.monotonic() + self.section.patience_s
        async with self._changed:
            while not any(replica.trusted for replica in self.replicas):
                if time.monotonic() > end:
                    reasons = "; ".join(dict.fromkeys(str(replica.fault) for replica in self.replicas))
                    raise Unavailable(f"no server was healthy for {self.section.patience_s:g} s: {reasons}")
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
