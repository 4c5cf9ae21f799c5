"""Credit of a run: its streams with their units, its floor, and its extreme tokens.

The algorithm's own words, from credit.json of the run folder; no algorithm is named or imported here.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topd.report.stored import StoredRun
from topd.report.stored_step import StoredStep

STREAMS = ("log_ratio", "token_reward", "return", "advantage")
"""Streams that tokens are coloured by."""

NUM_EXTREMES = 10
"""Length of the lists of worst-rejected and most-credited tokens of a step."""

TOP_SHARE = 0.01
"""The tokens with the largest advantages, by whose part of the whole one sees how far credit is spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One number per token: what it is called, its unit, and what it means."""

    key: str
    label: str
    unit: str
    meaning: str


def streams_of(run: StoredRun) -> tuple[Stream, ...]:
    """STREAMS with their units under the run's own settings; "" in older folders, which do not hold them."""
    units = {"log_ratio": "nats"} | (run.credit.units if run.credit else {})
    labels = ("log-ratio", "token reward", "return", "advantage")
    meanings = (
        "log-prob of the teacher minus that of the student",
        "what the token itself earns",
        "the token reward, with the credit for what followed",
        "the return, as the update weighs it",
    )
    rows = zip(STREAMS, labels, meanings, strict=True)
    return tuple(Stream(key=key, label=label, unit=units.get(key, ""), meaning=meaning) for key, label, meaning in rows)


def algorithm_of(run: StoredRun) -> Mapping[str, Any]:
    """The run's `[algorithm]` table; empty if it has none."""
    table = run.setting("algorithm")
    return table if isinstance(table, Mapping) else {}


def floor_of(run: StoredRun) -> tuple[float, str] | None:
    """Lowest token reward that the run's credit can give, and its formula; None without one, and in older folders."""
    return run.credit.floor if run.credit else None


def settings_in_use(run: StoredRun) -> dict[str, Any]:
    """Keys of the `[algorithm]` table except `type` and those that the others leave unread."""
    unread = run.credit.unread if run.credit else {}
    return {key: value for key, value in algorithm_of(run).items() if key != "type" and key not in unread}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A token that stands out in its step; `value` is the number it stands out by."""

    group: int
    rollout: int
    token: int
    token_id: int
    value: float


def differ_within(step: StoredStep, stream: str) -> bool:
    """True if some completion has tokens with different numbers: without one, no token stands out."""
    parts = (rollout.streams.get(stream, np.zeros(0)) for rollout in step.rollouts)
    return any(len(np.unique(part[~np.isnan(part)])) > 1 for part in parts)


def extremes(step: StoredStep, stream: str, *, lowest: bool, count: int = NUM_EXTREMES) -> list[Extreme]:
    """The tokens of a whole step with the lowest (or highest) numbers of a stream, the most extreme and the earlier first."""
    pick = heapq.nsmallest if lowest else heapq.nlargest
    return pick(count, _candidates(step, stream, lowest, count), key=lambda extreme: extreme.value)


def _candidates(step: StoredStep, stream: str, lowest: bool, count: int) -> Iterator[Extreme]:
    for group in step.groups:
        for rollout in group.rollouts:
            values = rollout.streams.get(stream)
            if values is None or not len(values):
                continue
            known = np.flatnonzero(~np.isnan(values))
            near = known[np.argsort(values[known] if lowest else -values[known], kind="stable")[:count]]
            for token in near.tolist():
                ids = rollout.token_ids
                yield Extreme(
                    group=group.index, rollout=rollout.index, token=token, token_id=ids[token], value=float(values[token])
                )


def top_sum(size: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[int, float]:
    """Count and sum of the largest TOP_SHARE of some numbers."""
    top = math.ceil(TOP_SHARE * len(size))
    return top, float(np.partition(size, len(size) - top)[len(size) - top :].sum()) if top else 0.0
