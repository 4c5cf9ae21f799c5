"""Work that waits for the model: bounded, taken in batches, scoring and sampling in turn, new weights first."""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import ApiError
from topd.serve.work import MAX_TOKENS, SAMPLING_ROWS, Reload, Sampling, Scoring, Work

LONGEST_RETRY = 30
"""Seconds a client is told to stay away at most."""


class Task:
    """Work of one request, waiting or running. `request` is the same for all tasks of a request."""

    def __init__(self, work: Work, request: object) -> None:
        self.work = work
        self.request = request
        self.num_tokens = work.num_tokens
        self.num_ids = work.num_ids
        self.future: Future[Any] = Future()
        self.abandoned = False
        """The client has left: nobody will read the result."""


class TaskQueue:
    """Any thread may put work in; one takes it out (`next` or `take`) and says when it is done (`finished`)."""

    def __init__(self, metrics: ServerMetrics, *, max_requests: int, max_batch_tokens: int, alone: bool = False) -> None:
        self._metrics = metrics
        self._max_requests = max_requests
        sizes = (1, 0, 0) if alone else (1, max_batch_tokens, SAMPLING_ROWS)
        self._limits: dict[type[Work], int] = dict(zip((Reload, Scoring, Sampling), sizes, strict=True))
        self._changed = threading.Condition()
        self._waiting: dict[type[Work], deque[Task]] = {work: deque() for work in self._limits}
        self._requests: Counter[object] = Counter()
        self._served: Counter[object] = Counter()
        """Parts that ran already, of requests that have more."""
        self._seconds_per_token: dict[type[Work], float] = {Reload: 0.0, Scoring: 1e-4, Sampling: 1e-3}
        self._last: type[Work] = Sampling
        self._running = False
        self._paused = False
        self._abort_at = float("inf")
        self.closed = False

    def submit(self, works: Sequence[Work]) -> list[Task]:
        """Queue all work of one request, or none. Raises ApiError: 413, 429 with a time to wait, 503."""
        request = object()
        tasks = [Task(work, request) for work in works]
        num_tokens, num_ids = sum(task.num_tokens for task in tasks), sum(task.num_ids for task in tasks)
        if num_tokens > MAX_TOKENS:
            raise ApiError(413, f"the request asks for {num_tokens} tokens, more than {MAX_TOKENS}; split it")
        with self._changed:
            if self.closed:
                raise ApiError(503, "the server is shutting down")
            waiting = [task for queue in self._waiting.values() for task in queue]
            is_full = len(self._requests) >= self._max_requests or sum(task.num_ids for task in waiting) + num_ids > MAX_TOKENS
            if is_full and num_tokens:
                raise ApiError(429, "the queue is full; send the request again later", retry_after=self._retry_after(waiting))
            for task in tasks:
                self._waiting[type(task.work)].append(task)
                self._requests[request] += 1
            self._metrics.queued.set(len(self._requests))
            self._changed.notify_all()
        return tasks

    def withdraw(self, tasks: Sequence[Task]) -> None:
        """The client has left: drop what has not begun, and mark the rest."""
        with self._changed:
            for task in tasks:
                task.abandoned = True
                queue = self._waiting[type(task.work)]
                if task.future.cancel() and task in queue:
                    queue.remove(task)
                    self._leave(task)

    def pause(self, *, abort: bool) -> None:
        """Give out nothing but reloads from now on; returns when nothing runs. `abort` answers 503 to all the rest."""
        with self._changed:
            self._paused = True
            if abort:
                self._abort_at = 0.0
                self._refuse("aborted by /pause; send the request again", (Scoring, Sampling))
            self._changed.wait_for(lambda: not self._running)
            if not self.closed:
                self._abort_at = float("inf")

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self, grace: float) -> None:
        """Answer 503 to what waits and to what comes; what runs may go on for `grace` seconds."""
        with self._changed:
            self.closed = True
            self._abort_at = time.monotonic() + grace
            self._refuse("the server is shutting down", tuple(self._waiting))
            self._changed.notify_all()

    def next(self) -> list[Task]:
        """Waits for work that can run together. Empty once the queue is closed."""
        with self._changed:
            while not self.closed:
                turn = (Reload, Scoring, Sampling) if self._last is Sampling else (Reload, Sampling, Scoring)
                for work in turn:
                    if batch := self._take(work):
                        self._last, self._running = work, True
                        return batch
                self._changed.wait()
        return []

    def take(self, work: type[Work]) -> list[Task]:
        """The same of one sort only, without waiting; for what runs inside of other work."""
        if not self._waiting[work]:
            return []
        with self._changed:
            return self._take(work)

    def finished(self) -> None:
        """What `next` gave out has been answered."""
        with self._changed:
            self._running = False
            self._changed.notify_all()

    def check(self, batch: Sequence[Task]) -> None:
        """Raises ApiError if what runs is to end now, or nobody waits for it."""
        if time.monotonic() >= self._abort_at:
            raise ApiError(503, "aborted; send the request again", retry_after=1)
        if all(task.abandoned for task in batch):
            raise ApiError(503, "the client has left")

    def took(self, batch: Sequence[Task], seconds: float) -> None:
        """How long a batch ran, for the time a client is told to wait."""
        work, num_tokens = type(batch[0].work), sum(task.num_tokens for task in batch)
        if num_tokens:
            self._seconds_per_token[work] = 0.7 * self._seconds_per_token[work] + 0.3 * seconds / num_tokens

    def _retry_after(self, waiting: Sequence[Task]) -> int:
        """Seconds until what waits will be done, at the rates measured."""
        expected = sum(task.num_tokens * self._seconds_per_token[type(task.work)] for task in waiting)
        return max(1, min(LONGEST_RETRY, round(expected)))

    def _take(self, work: type[Work]) -> list[Task]:
        """The task whose turn it is and those that can run with it, as many as make one batch. The lock must be held."""
        queue, batch, size = self._waiting[work], list[Task](), 0
        if self._paused and work is not Reload:
            return []
        for task in self._in_turn(queue):
            if batch and task.work.kind != batch[0].work.kind:
                continue
            if batch and size + task.work.size > self._limits[work]:
                break
            queue.remove(task)
            self._leave(task)
            if task.future.set_running_or_notify_cancel():
                if task.request in self._requests:  # else it was its last part
                    self._served[task.request] += 1
                batch.append(task)
                size += task.work.size
        return batch

    def _in_turn(self, queue: Sequence[Task]) -> list[Task]:
        """Those of requests that have had least come first, so that a request of many parts does not hold up all others."""
        had, keyed = Counter(self._served), []
        for number, task in enumerate(queue):
            keyed.append((had[task.request], number, task))
            had[task.request] += 1
        return [task for _, _, task in sorted(keyed, key=lambda each: each[:2])]

    def _refuse(self, reason: str, works: Sequence[type[Work]]) -> None:
        """Answer 503 to all of these sorts that waits. The lock must be held."""
        for work in works:
            while queue := self._waiting[work]:
                task = queue.popleft()
                self._leave(task)
                if task.future.set_running_or_notify_cancel():
                    task.future.set_exception(ApiError(503, reason, retry_after=1))

    def _leave(self, task: Task) -> None:
        """The task waits no more."""
        self._requests[task.request] -= 1
        if not self._requests[task.request]:
            del self._requests[task.request]
            self._served.pop(task.request, None)
        self._metrics.queued.set(len(self._requests))
