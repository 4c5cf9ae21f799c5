"""The one thread that runs the model."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from topd.errors import first_line
from topd.models.language_model import LanguageModel
from topd.models.logprobs import RankedLogprobs, Tokens, ranked_logprobs, score_groups
from topd.rollout.embedded import EmbeddedEngine
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import ApiError
from topd.serve.queue import Task, TaskQueue
from topd.serve.weights import fingerprint, reload_weights
from topd.serve.work import SAMPLING_ROWS, Reload, Sampling, Scoring
from topd.types import RolloutGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

SMALL = 64
"""Prompts and completions shorter than this count as of one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Per group and completion of a `Scoring`, log-probs on the CPU, and ranks if they were wanted."""

    logprobs: tuple[tuple[Tensor, ...], ...]
    ranked: tuple[tuple[RankedLogprobs, ...], ...] | None
    fingerprint: str
    """Of the weights that computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The completions of a `Sampling`, and what else was likely, if that was wanted."""

    group: RolloutGroup
    ranked: tuple[RankedLogprobs, ...] | None
    fingerprint: str


def joined(work: Scoring, pieces: Sequence[Scored]) -> Scored:
    """What the pieces of `scoring_pieces` gave, as if the work had been done at once."""

    def regrouped(parts: Iterator[T]) -> tuple[tuple[T, ...], ...]:
        return tuple(tuple(islice(parts, len(group.completions))) for group in work.groups)

    ranked = [piece.ranked for piece in pieces if piece.ranked is not None]
    return Scored(
        logprobs=regrouped(part for piece in pieces for parts in piece.logprobs for part in parts),
        ranked=regrouped(part for piece in ranked for parts in piece for part in parts) if ranked else None,
        fingerprint=pieces[0].fingerprint,
    )


class Worker:
    """Owns the model: computes what is in the queue, until that is closed. `alone`: one request at a time."""

    def __init__(
        self, model: LanguageModel, metrics: ServerMetrics, *, max_queue: int, max_tokens: int, alone: bool = False
    ) -> None:
        self.model = model
        self.queue = TaskQueue(metrics, max_requests=max_queue, max_batch_tokens=max_tokens, alone=alone)
        self.fingerprint = fingerprint(model)
        self._metrics = metrics
        self.max_tokens = max_tokens
        self._engine = EmbeddedEngine(model, max_concurrent_rollouts=SAMPLING_ROWS)
        self._scoring_due = 0.0
        self._thread = threading.Thread(target=self._loop, name="topd-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.queue.closed

    def join(self, timeout: float) -> bool:
        """Wait for the thread, that many seconds; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while batch := self.queue.next():
            self._run(batch)
            self.queue.finished()

    def _run(self, batch: list[Task]) -> None:
        """Compute and answer. What fails together is tried again one by one, so that a request fails for itself alone."""
        compute: Any = {Reload: self._reload, Scoring: self._score, Sampling: self._sample}[type(batch[0].work)]
        start = time.perf_counter()
        try:
            results = compute(batch)
        except ApiError as error:
            for task in batch:
                task.future.set_exception(error)
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            log.warning("a batch of %d failed and is tried again one by one: %s", len(batch), first_line(error))
            for task in batch:
                self._run([task])
        else:
            for task, result in zip(batch, results, strict=True):
                task.future.set_result(result)
            self._metrics.batches.labels(type(batch[0].work).__name__.lower()).observe(len(batch))
            self.queue.took(batch, time.perf_counter() - start)

    def _score(self, batch: list[Task]) -> list[Scored]:
        works = [task.work for task in batch if isinstance(task.work, Scoring)]
        groups = [group for work in works for group in work.groups]
        settings: dict[str, Any] = dict(
            max_tokens=self.max_tokens,
            temperature=works[0].temperature,
            on_tokens=self._step(batch, self._metrics.scored.inc),
        )
        ranked = None
        if works[0].top_k is None:
            logprobs = by_size(groups, lambda part: score_groups(self.model, part, **settings))
        else:
            top_k = max(work.top_k or 0 for work in works)
            ranked = by_size(groups, lambda part: ranked_logprobs(self.model, part, top_k=top_k, **settings))
            logprobs = [tuple(part.logprobs for part in parts) for parts in ranked]
        found, start = [], 0
        for work in works:
            own = slice(start, start := start + len(work.groups))
            theirs = None if ranked is None else tuple(ranked[own])
            found.append(Scored(logprobs=tuple(logprobs[own]), ranked=theirs, fingerprint=self.fingerprint))
        return found

    def _sample(self, batch: list[Task]) -> list[Sampled]:
        works = [task.work for task in batch if isinstance(task.work, Sampling)]
        params, top_k = works[0].params, max(work.top_k for work in works)
        step = self._step(batch, self._metrics.generated.inc)

        def decoded(num_tokens: int) -> None:
            step(num_tokens)
            self._score_meanwhile()

        groups = self._engine.generate([work.prompt for work in works], params, on_tokens=decoded)
        ranked: Sequence[tuple[RankedLogprobs, ...] | None] = [None] * len(groups)
        if top_k:
            ranked = ranked_logprobs(
                self.model,
                groups,
                max_tokens=self.max_tokens,
                top_k=top_k,
                temperature=params.temperature or 1.0,
                on_tokens=self._step(batch, self._metrics.scored.inc),
            )
        pairs = zip(groups, ranked, strict=True)
        return [Sampled(group=group, ranked=parts, fingerprint=self.fingerprint) for group, parts in pairs]

    def _score_meanwhile(self) -> None:
        """Between two decoded tokens: scoring that waits may take as long as sampling has had since the last time."""
        if time.perf_counter() < self._scoring_due:
            return
        if batch := self.queue.take(Scoring):
            start = time.perf_counter()
            self._run(batch)
            end = time.perf_counter()
            self._scoring_due = end + (end - start)

    def _step(self, batch: list[Task], count: Callable[[float], None]) -> Callable[[int], None]:
        """To be called between two passes of the model."""

        def step(num_tokens: int) -> None:
            count(num_tokens)
            self.queue.check(batch)

        return step

    def _reload(self, batch: list[Task]) -> list[None]:
        folders = [task.work.folder for task in batch if isinstance(task.work, Reload)]
        for folder in folders:
            reload_weights(self.model, folder)
            self.fingerprint = fingerprint(self.model)
        return [None for _ in folders]


def by_size(groups: Sequence[Tokens], score: Callable[[list[Tokens]], list[T]]) -> list[T]:
    """What `score` gives for every group, asked for groups of like size together.

    A pass pads every row to the longest. Beside one long completion (a prefix that is scored) short ones would cost its length.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for i, group in enumerate(groups):
        size = len(group.prompt_ids), max(map(len, group.completions))
        places.setdefault((size[0] // SMALL and size[0].bit_length(), size[1] // SMALL and size[1].bit_length()), []).append(i)
    found = {i: part for own in places.values() for i, part in zip(own, score([groups[i] for i in own]), strict=True)}
    return [found[i] for i in range(len(groups))]
