"""Difference of two credits of the same tokens: sums that add up over steps, and the numbers made of them.

Only tokens whose reward and advantage are finite under both settings are compared; every row says how many those are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict

from topd.report.credit import top_sum

Values = np.ndarray[Any, np.dtype[np.float64]]

NEAR_FLOOR = 0.9
"""A reward is at its floor if it is below this share of it: for log(1 - alpha), near a tenth of the student's probability."""

FORMAT = 1
"""Of the files in rescores/; another number means another shape."""

NUM_BINS = 40
_OUTER = 0.5
"""Percent of the first step's advantages that lie outside the bins on each side; the outermost bins count them and all others."""


PAIRS = {
    "reward_mean": "mean token reward",
    "reward_std": "std of the token rewards",
    "floor_share": "tokens within 10 % of the reward's floor",
    "mean_abs_advantage": "mean |advantage|",
    "top_share": "|advantage| held by the top 1 % of tokens",
    "silent_groups": "groups without signal",
}
"""Entries of a Row about each credit."""

SINGLES = {
    "pearson": "correlation of the advantages (Pearson)",
    "spearman": "correlation of their ranks (Spearman)",
    "cosine": "cosine of the two as weights of gradients",
    "sign_changes": "tokens whose advantage changes sign",
}
"""Entries of a Row about both together."""


def changes_in_words(changed: Mapping[str, Mapping[str, Any]]) -> str:
    """{"alpha": {"old": 0.2, "new": 0.1}} -> "alpha 0.2 -> 0.1"."""
    return ", ".join(f"{key} {'unset' if v['old'] is None else v['old']} -> {v['new']}" for key, v in changed.items())


def written(name: str, value: float | int | None) -> str:
    """A number of a Row as people read it; "-" where it is not defined."""
    if value is None:
        return "-"
    if name == "silent_groups":
        return f"{value:,.0f}"
    if name in ("floor_share", "top_share", "sign_changes"):
        return f"{value:.1%}"
    return f"{value:.4f}" if name in ("reward_std", "mean_abs_advantage") else f"{value:+.4f}"


class OldNew(TypedDict):
    old: float | None
    new: float | None


class Row(TypedDict):
    """A step, or all of them together (`step` None). Numbers are over `compared` tokens; None where one is not defined."""

    step: int | None
    groups: int
    tokens: int
    compared: int
    reward_mean: OldNew
    reward_std: OldNew
    """Of the token rewards, population form."""
    floor_share: OldNew
    """Tokens whose reward is within 10 % of the lowest that the settings can give; None if there is no such floor."""
    mean_abs_advantage: OldNew
    top_share: OldNew
    """Share of the sum of |advantage| that is held by each step's 1 % of tokens with the largest."""
    silent_groups: OldNew
    """Groups, of all `groups`, in which every advantage is 0."""
    pearson: float | None
    spearman: float | None
    """Of the ranks, ties at their mean. Over several steps: the mean of the steps, weighted by tokens."""
    sign_changes: float | None
    """Share of tokens whose advantage is above 0 under one setting and below 0 under the other."""
    cosine: float | None
    """Of the two vectors of loss weight times advantage: what the tokens' gradients are multiplied by in a step taken as one
    mini-batch."""


class Histogram(TypedDict):
    """Both advantages in shared bins, `edges` one more than counts; the outermost bins also count what lies beyond them."""

    edges: list[float]
    old: list[NonNegativeInt]
    new: list[NonNegativeInt]


class Joint(TypedDict):
    """counts[i][j]: tokens with the old advantage in bin i and the new one in bin j; the outermost bins are open."""

    old_edges: list[float]
    new_edges: list[float]
    counts: list[list[NonNegativeInt]]


class ChangedToken(TypedDict):
    """`group` and `rollout` are indices in the step, as `topd explain` takes them; `position` counts from 0."""

    step: int
    group: int
    rollout: int
    position: int
    token_id: int
    prompt_id: str
    old: float
    new: float


class Rescore(TypedDict):
    """Content of NAME.json. Rewards are in nats; infinities and NaN do not occur, None stands for "not defined"."""

    format: int
    """1; another number means another shape."""
    name: str
    """The file's name without .json."""
    topd_version: str
    changed: dict[str, dict[str, Any]]
    """Key of `[algorithm]` that was given, without the section -> {"old": value or None, "new": value}. Empty: none differs."""
    old: dict[str, Any]
    """The run's `[algorithm]` table, resolved."""
    new: dict[str, Any]
    """The table that the credit was recomputed with."""
    largest_difference: float | None
    """Between stored and recomputed advantages under the run's own settings; None if the folder holds none to compare with."""
    steps: list[Row]
    overall: Row
    skipped_steps: list[int]
    """Steps whose files could not be read."""
    num_tokens: int
    same: bool
    """True if every compared advantage is exactly the same: the changed settings do not change the credit of these rollouts."""
    histogram: Histogram
    joint: Joint
    top_changes: list[ChangedToken]
    """The tokens whose advantage changed most, the most first."""


_RESCORE = TypeAdapter(Rescore)


def parsed(content: Mapping[str, Any]) -> Rescore:
    """Validated content of a file in rescores/. Raises ValueError for another shape."""
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r}")
    rescore = _RESCORE.validate_python(content)
    bins, joint = rescore["histogram"], rescore["joint"]
    across, down = len(joint["old_edges"]) - 1, len(joint["new_edges"]) - 1
    shapes = [len(joint["counts"]) == across, *(len(counts) == down for counts in joint["counts"])]
    if not all(shapes) or not len(bins["edges"]) - 1 == len(bins["old"]) == len(bins["new"]):
        raise ValueError("its counts do not fit their edges")
    return rescore


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """The tokens of a step under one setting, flat."""

    reward: Values
    floor: Values
    """The lowest reward that each token could have; not finite, or not below 0, where there is none."""
    advantage: Values
    weight: Values
    """Share of each token in the loss."""
    silent_groups: int


Sums = Mapping[str, float]


def sums_of(old: Credited, new: Credited, *, groups: int) -> tuple[Sums, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Sums of a step for `row`, and the mask of compared tokens."""
    both = np.isfinite(old.reward) & np.isfinite(new.reward) & np.isfinite(old.advantage) & np.isfinite(new.advantage)
    a, b = old.advantage[both], new.advantage[both]
    sums: dict[str, float] = {"groups": float(groups), "tokens": float(len(both)), "compared": float(len(a))}
    for name, side in (("old", old), ("new", new)):
        sums |= {f"{name}_{key}": value for key, value in _side_sums(side, both).items()}
    sums |= {"ab": float(a @ b), "flips": float(np.count_nonzero(np.sign(a) * np.sign(b) < 0))}
    weighted = a * old.weight[both], b * new.weight[both]
    for name, x, y in (("gg_old", 0, 0), ("gg_new", 1, 1), ("gg", 0, 1)):
        sums[name] = float(weighted[x] @ weighted[y])
    spearman = _pearson(ranks(a), ranks(b))
    sums |= {"ranked": 0.0 if spearman is None else float(len(a)), "rank_correlation": (spearman or 0.0) * len(a)}
    return sums, both


def _side_sums(side: Credited, both: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, float]:
    reward, advantage, floor = side.reward[both], side.advantage[both], side.floor[both]
    size = np.abs(advantage)
    has_floor = np.isfinite(floor) & (floor < 0)
    return {
        "reward": float(reward.sum()),
        "reward2": float(reward @ reward),
        "floor": float(np.count_nonzero(reward[has_floor] <= NEAR_FLOOR * floor[has_floor])),
        "with_floor": float(np.count_nonzero(has_floor)),
        "a": float(advantage.sum()),
        "aa": float(advantage @ advantage),
        "size": float(size.sum()),
        "top": top_sum(size)[1],
        "silent": float(side.silent_groups),
    }


def row(sums: Sums, step: int | None) -> Row:
    n = sums["compared"]

    def both(make: Any) -> OldNew:
        return {"old": make("old_"), "new": make("new_")}

    def std(side: str) -> float | None:
        mean = _share(sums[side + "reward"], n)
        return None if mean is None else math.sqrt(max(sums[side + "reward2"] / n - mean * mean, 0.0))

    spread = [_spread(n, sums[side + "a"], sums[side + "aa"]) for side in ("old_", "new_")]
    product = n * sums["ab"] - sums["old_a"] * sums["new_a"]
    return {
        "step": step,
        "groups": int(sums["groups"]),
        "tokens": int(sums["tokens"]),
        "compared": int(n),
        "reward_mean": both(lambda side: _share(sums[side + "reward"], n)),
        "reward_std": both(std),
        "floor_share": both(lambda side: _share(sums[side + "floor"], n) if sums[side + "with_floor"] else None),
        "mean_abs_advantage": both(lambda side: _share(sums[side + "size"], n)),
        "top_share": both(lambda side: _share(sums[side + "top"], sums[side + "size"])),
        "silent_groups": both(lambda side: int(sums[side + "silent"])),
        "pearson": _within_one(_share(product, math.sqrt(spread[0] * spread[1]))),
        "spearman": _within_one(_share(sums["rank_correlation"], sums["ranked"])),
        "sign_changes": _share(sums["flips"], n),
        "cosine": _within_one(_share(sums["gg"], math.sqrt(sums["gg_old"] * sums["gg_new"]))),
    }


def ranks(values: Values) -> Values:
    """Ranks from 1, equal values at the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _pearson(a: Values, b: Values) -> float | None:
    if len(a) == 0:
        return None
    a, b = a - a.mean(), b - b.mean()
    return _share(float(a @ b), math.sqrt(float(a @ a) * float(b @ b)))


def _spread(n: float, total: float, squares: float) -> float:
    """n^2 times the variance; 0 where it is nothing but rounding."""
    spread = n * squares - total * total
    return spread if spread > 1e-12 * n * squares else 0.0


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _within_one(value: float | None) -> float | None:
    return None if value is None else min(max(value, -1.0), 1.0)


def edges_for(*values: Values) -> Values:
    """Bins for advantages, made of the first step's."""
    together = np.concatenate(values)
    low, high = np.percentile(together, [_OUTER, 100 - _OUTER]) if len(together) else (-1.0, 1.0)
    middle, half = (low + high) / 2, max((high - low) / 2, 1e-3)
    return np.linspace(middle - half, middle + half, NUM_BINS + 1)


def binned(values: Values, edges: Values) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The bin of every value; the outermost bins are open."""
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
