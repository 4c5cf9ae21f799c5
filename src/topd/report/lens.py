"""The data of the token lens: which groups a page holds, and every number of their tokens.

A page cannot hold all rollouts of a long run. It takes whole groups of evenly spread steps (the first and the last among them)
up to a budget of tokens, in every step the groups with the worst-rejected and the most-credited tokens first, then an even
sample; and it says how many of how many it holds. The lists of extreme tokens are over the whole step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from topd.report.credit import STREAMS, Extreme, differ_within, extremes, floor_of, streams_of
from topd.report.stored import StoredRun, names
from topd.report.stored_step import StoredGroup, StoredRollout, StoredStep
from topd.report.tokens import Shown, Texts, plain, show_text

MAX_TOKENS = 100_000
"""Tokens of a page's rollouts, over all its runs."""

_KEPT_TOKENS = 4_000_000
_MIN_GROUPS = 4
_MAX_GROUPS = 24
_SHORTEST = 64
"""Tokens of a completion that a page holds at least, however small the budget."""

_DETAIL = ("behaviour_logprob", "teacher_logprob", "importance_ratio")
_KINDS = {"text": "t", "space": "s", "newline": "n", "mark": "m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Rollouts of one run in a page: `data` for lens.js, and the steps read for it; of large ones the newest."""

    data: Mapping[str, Any]
    steps: tuple[StoredStep, ...]


def hold(runs: Sequence[StoredRun], *, max_tokens: int = MAX_TOKENS, steps: Sequence[int] | None = None) -> list[Held]:
    """The rollouts of a page, run by run. `steps`: those to hold; an even spread if None."""
    share = max_tokens // max(1, len(runs))
    return [_hold(run, label, share, steps) for run, label in zip(runs, names(runs), strict=True)]


def _hold(run: StoredRun, label: str, max_tokens: int, wanted: Sequence[int] | None) -> Held:
    texts = Texts(run.vocabulary() if run.steps else {})
    page = _Page(texts)
    kept: list[StoredStep] = []
    steps = []
    last = _last(run) if wanted is None else None
    numbers = _spread(run, last, max_tokens) if last else [step for step in run.steps if step in (wanted or ())]
    for number in numbers:
        step = last if last is not None and number == last.step else run.step(number)
        if step is None or not step.groups:
            continue
        kept.append(step)
        while len(kept) > 1 and sum(each.num_tokens for each in kept) > _KEPT_TOKENS:
            del kept[0]
        steps.append(page.step(step, max_tokens // len(numbers)))
    floor = floor_of(run)
    streams = streams_of(run)
    data = {
        "name": label,
        "path": str(run.path),
        "has_teacher": page.has_teacher,
        "streams": [asdict(stream) for stream in streams],
        "floor": floor[0] if floor else None,
        "floor_words": floor[1] if floor else None,
        "num_steps": len(run.steps),
        "scale": page.scale(floor[0] if floor else 0.0),
        "vocabulary": {str(token_id): _encoded(texts.alone(token_id)) for token_id in sorted(page.used)},
        "special": sorted(token_id for token_id in page.used if texts.is_special(token_id)),
        "steps": steps,
    }
    return Held(data=data, steps=tuple(kept))


def _last(run: StoredRun) -> StoredStep | None:
    """The newest step that can be read."""
    return next((step for number in reversed(run.steps) if (step := run.step(number)) is not None and step.groups), None)


def _spread(run: StoredRun, last: StoredStep, max_tokens: int) -> list[int]:
    """Steps to hold: as many as leave room for a few groups as long as the last ones, the first and the last among them."""
    of_group = max(1, sum(group.num_tokens for group in last.groups) // len(last.groups))
    count = min(len(run.steps), max(2, max_tokens // (_MIN_GROUPS * of_group)))
    return [run.steps[i] for i in sorted(set(np.linspace(0, len(run.steps) - 1, count).round().astype(int).tolist()))]


class _Page:
    """State shared by the steps of one run: the tokens used, and the numbers that scale the colours."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.used: set[int] = set()
        self._values: dict[str, list[np.ndarray[Any, Any]]] = {key: [] for key in STREAMS}

    @property
    def has_teacher(self) -> bool:
        return bool(self._values["log_ratio"])

    def scale(self, floor: float) -> dict[str, float]:
        """Per stream the 99th percentile of its absolute numbers; the floor of the token reward lies within it."""
        scales = {}
        for key, parts in self._values.items():
            values = np.abs(np.concatenate(parts)) if parts else np.zeros(0)
            values = values[np.isfinite(values)]
            if len(values):
                at_least = abs(floor) if key == "token_reward" else 0.0
                scales[key] = _rounded_up(max(float(np.percentile(values, 99)), at_least, 1e-6))
        return scales

    def step(self, step: StoredStep, max_tokens: int) -> dict[str, Any]:
        worst = extremes(step, "log_ratio", lowest=True)
        credited = extremes(step, "advantage", lowest=False) if differ_within(step, "advantage") else []
        chosen, longest = _choose(step, [*_alternating(worst, credited)], max_tokens)
        held = {group.index for group in chosen}

        def listed(tokens: Sequence[Extreme]) -> list[dict[str, Any]]:
            self.used |= {extreme.token_id for extreme in tokens}
            return [self._extreme(extreme, extreme.group in held and extreme.token < longest) for extreme in tokens]

        return {
            "step": step.step,
            "num_groups": len(step.groups),
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
            "rollouts": [self._rollout(rollout, longest, graded=group.answer is not None) for rollout in group.rollouts],
        }

    def _rollout(self, rollout: StoredRollout, longest: int, *, graded: bool) -> dict[str, Any]:
        ids = rollout.token_ids[:longest]
        self.used |= set(ids)
        for key, parts in self._values.items():
            if key in rollout.streams:
                parts.append(rollout.streams[key])
        shown = enumerate(zip(ids, self.texts.show(ids), strict=True))
        streams = {name: rollout.streams.get(name) for name in (*_DETAIL, *self._values)}
        clipped = rollout.streams.get("clipped")
        rewards = rollout.streams.get("token_reward", np.zeros(0))
        with np.errstate(invalid="ignore"):  # infinities of both signs
            mean_token_reward = _number(float(rewards.mean(dtype=np.float64))) if len(rewards) else None
        return {
            "index": rollout.index,
            "grade": rollout.grade if graded else None,
            "finish_reason": rollout.finish_reason,
            "update": rollout.update,
            "num_tokens": len(rollout.token_ids),
            "mean_token_reward": mean_token_reward,
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


def _rounded_up(value: float) -> float:
    """To three significant digits, never below the value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def _number(value: float) -> float | str | None:
    """Six significant digits; JSON knows no infinity."""
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return None if math.isnan(value) else "-inf" if value < 0 else "inf"
