"""The data of the token lens: which groups a page holds, and every number of their tokens.

A page cannot hold all rollouts of a long run. It takes whole groups of evenly spread steps (the first and the last among them)
up to a budget of tokens, in every step the groups with the worst-rejected and the most-credited tokens first, then an even
sample; and it says how many of how many it holds. The lists of extreme tokens are over the whole step.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topd.report.stored import StoredGroup, StoredRollout, StoredRun, StoredStep, names
from topd.report.tokens import Shown, Texts, plain, show_text

MAX_TOKENS = 60_000
"""Tokens of a page's rollouts, over all its runs."""

NUM_EXTREMES = 10
"""Length of the lists of worst-rejected and most-credited tokens of a step."""

_MIN_GROUPS = 2
_MAX_GROUPS = 24
_SHORTEST = 64
"""Tokens of a completion that a page holds at least, however small the budget."""

COLORED = (
    {"key": "log_ratio", "label": "log-ratio", "unit": "nats", "meaning": "log-prob of the teacher minus that of the student"},
    {"key": "reward", "label": "reward", "unit": "nats", "meaning": "what the token itself earns"},
    {"key": "return", "label": "return", "unit": "nats", "meaning": "the reward, with the credit for what followed"},
    {"key": "advantage", "label": "advantage", "unit": "standard deviations", "meaning": "the return, as the update weighs it"},
)
"""Streams that tokens are coloured by."""

_DETAIL = ("student_logprob", "teacher_logprob", "importance_ratio")
_KINDS = {"text": "t", "space": "s", "newline": "n", "mark": "m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A token that stands out in its step; `value` is the number it stands out by."""

    group: int
    rollout: int
    token: int
    token_id: int
    value: float


def floor_of(run: StoredRun) -> tuple[float, str] | None:
    """The lowest reward that the run's credit can give, and how it comes about; None if there is none."""
    reward, alpha, bound = (run.setting(f"algorithm.{key}") for key in ("reward", "alpha", "reward_bound"))
    match reward:
        case "proximal" if isinstance(alpha, float | int) and 0 < alpha < 1:
            return math.log1p(-alpha), f"log(1 - alpha) with alpha = {alpha:g}"
        case "clipped" | "floor" if isinstance(bound, float | int):
            return -float(bound), f"-reward_bound = {-bound:g}"
        case "power":
            return -1.0, "a difference of two powers of probabilities"
    return None


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


def payload(
    runs: Sequence[StoredRun],
    *,
    max_tokens: int = MAX_TOKENS,
    steps: Sequence[int] | None = None,
    on_step: Callable[[StoredRun, StoredStep], None] = lambda run, step: None,
) -> dict[str, Any]:
    """What the page's lens.js shows. `steps`: those to hold; an even spread if None. `on_step` sees every step that was read."""
    share = max_tokens // max(1, len(runs))
    found = [_run(run, label, share, steps, on_step) for run, label in zip(runs, names(runs), strict=True)]
    return {"streams": COLORED, "runs": found}


def _run(
    run: StoredRun, label: str, max_tokens: int, wanted: Sequence[int] | None, on_step: Callable[[StoredRun, StoredStep], None]
) -> dict[str, Any]:
    texts = Texts(run.vocabulary() if run.steps else {})
    floor = floor_of(run)
    page = _Page(texts)
    numbers = _spread(run, max_tokens) if wanted is None else [step for step in run.steps if step in wanted]
    steps = []
    for number in numbers:
        step = run.step(number)
        if step is not None and step.groups:
            on_step(run, step)
            steps.append(page.step(step, max_tokens // len(numbers)))
    return {
        "name": label,
        "algorithm": run.setting("algorithm.type"),
        "floor": floor[0] if floor else None,
        "floor_words": floor[1] if floor else None,
        "num_steps": len(run.steps),
        "scale": page.scale(floor[0] if floor else 0.0),
        "vocabulary": {str(token_id): _encoded(texts.alone(token_id)) for token_id in sorted(page.used)},
        "special": sorted(token_id for token_id in page.used if texts.is_special(token_id)),
        "steps": steps,
    }


def _spread(run: StoredRun, max_tokens: int) -> list[int]:
    """Steps to hold: as many as leave room for a few groups in each, the first and the last among them."""
    if not run.steps:
        return []
    last = next((step for number in reversed(run.steps) if (step := run.step(number)) is not None and step.groups), None)
    if last is None:
        return []
    of_group = max(1, sum(group.num_tokens for group in last.groups) // len(last.groups))
    count = min(len(run.steps), max(2, max_tokens // (_MIN_GROUPS * of_group)))
    return [run.steps[i] for i in sorted(set(np.linspace(0, len(run.steps) - 1, count).round().astype(int).tolist()))]


class _Page:
    """What the steps of one run have in common: the tokens used, and the numbers that the colours are scaled by."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.used: set[int] = set()
        self._values: dict[str, list[np.ndarray[Any, Any]]] = {stream["key"]: [] for stream in COLORED}

    def scale(self, floor: float) -> dict[str, float]:
        """Per stream the 99th percentile of its absolute numbers; the floor of the reward lies within it."""
        found = {}
        for key, parts in self._values.items():
            values = np.abs(np.concatenate(parts)) if parts else np.zeros(0)
            values = values[np.isfinite(values)]
            if len(values):
                at_least = abs(floor) if key == "reward" else 0.0
                found[key] = float(f"{max(float(np.percentile(values, 99)), at_least, 1e-6):.3g}")
        return found

    def step(self, step: StoredStep, max_tokens: int) -> dict[str, Any]:
        worst, credited = extremes(step, "log_ratio", lowest=True), extremes(step, "advantage", lowest=False)
        chosen, longest = _choose(step, [*_alternating(worst, credited)], max_tokens)
        held = {group.index for group in chosen}

        def listed(found: Sequence[Extreme]) -> list[dict[str, Any]]:
            self.used |= {extreme.token_id for extreme in found}
            return [self._extreme(extreme, extreme.group in held and extreme.token < longest) for extreme in found]

        return {
            "step": step.step,
            "num_groups": len(step.groups),
            "num_tokens": sum(group.num_tokens for group in step.groups),
            "groups": [self._group(group, longest) for group in chosen],
            "worst": listed(worst),
            "credited": listed(credited),
        }

    def _extreme(self, extreme: Extreme, in_page: bool) -> dict[str, Any]:
        return {
            "group": extreme.group,
            "rollout": extreme.rollout,
            "token": extreme.token,
            "value": _number(extreme.value),
            "shown": _encoded(self.texts.alone(extreme.token_id)),
            "in_page": in_page,
        }

    def _group(self, group: StoredGroup, longest: int) -> dict[str, Any]:
        return {
            "index": group.index,
            "prompt_id": plain(show_text(group.prompt_id)),
            "domain": plain(show_text(group.domain)),
            "prompt": _encoded(show_text(group.prompt)),
            "answer": None if group.answer is None else _encoded(show_text(group.answer)),
            "policy_version": group.policy_version,
            "rollouts": [self._rollout(rollout, longest) for rollout in group.rollouts],
        }

    def _rollout(self, rollout: StoredRollout, longest: int) -> dict[str, Any]:
        ids = rollout.token_ids[:longest]
        self.used |= set(ids)
        for key, parts in self._values.items():
            if key in rollout.streams:
                parts.append(rollout.streams[key])
        shown = enumerate(zip(ids, self.texts.show(ids), strict=True))
        streams = {name: rollout.streams.get(name) for name in (*_DETAIL, *self._values)}
        clipped = rollout.streams.get("clipped")
        rewards = rollout.streams.get("reward", np.zeros(0))
        with np.errstate(invalid="ignore"):  # infinities of both signs
            mean_reward = _number(float(rewards.mean(dtype=np.float64))) if len(rewards) else None
        return {
            "index": rollout.index,
            "grade": rollout.grade,
            "finish_reason": rollout.finish_reason,
            "update": rollout.update,
            "num_tokens": len(rollout.token_ids),
            "mean_reward": mean_reward,
            "ids": list(ids),
            "shown": {str(i): _encoded(each) for i, (token_id, each) in shown if each != self.texts.alone(token_id)},
            **{
                name: None if values is None else list(map(_number, values[:longest].tolist()))
                for name, values in streams.items()
            },
            "clipped": None if clipped is None else clipped[:longest].astype(int).tolist(),
        }


def _choose(step: StoredStep, first: Sequence[Extreme], max_tokens: int) -> tuple[list[StoredGroup], int]:
    """Groups of a step for the page, in the step's order, and how many tokens of each completion."""
    even = np.linspace(0, len(step.groups) - 1, min(len(step.groups), _MAX_GROUPS)).round().astype(int).tolist()
    order = dict.fromkeys([*(extreme.group for extreme in first), *even])
    chosen: list[StoredGroup] = []
    used = 0
    for index in order:
        group = step.groups[index]
        if len(chosen) >= _MAX_GROUPS or (len(chosen) >= _MIN_GROUPS and used + group.num_tokens > max_tokens):
            continue
        chosen.append(group)
        used += group.num_tokens
    most = max(len(group.rollouts) for group in chosen)
    longest = max(len(rollout.token_ids) for group in chosen for rollout in group.rollouts)
    if used > max_tokens:
        longest = min(longest, max(_SHORTEST, max_tokens // (len(chosen) * most)))
    return sorted(chosen, key=lambda group: group.index), longest


def _alternating(worst: Sequence[Extreme], credited: Sequence[Extreme]) -> Iterator[Extreme]:
    for i in range(max(len(worst), len(credited))):
        yield from worst[i : i + 1]
        yield from credited[i : i + 1]


def _encoded(shown: Shown) -> str | list[tuple[str, str]]:
    """Segments for the page: a plain string where there is nothing to mark."""
    if all(segment.kind == "text" for segment in shown):
        return "".join(segment.text for segment in shown)
    return [(_KINDS[segment.kind], segment.text) for segment in shown]


def _number(value: float) -> float | str | None:
    """Six significant digits; JSON knows no infinity."""
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return None if math.isnan(value) else "-inf" if value < 0 else "inf"
