"""A verdict on one aspect of a run, and the rules by which numbers of several steps become one.

Rules. A *usual* value is the median of the last third of the steps, at least 2 and at most 10 of them. A *change* compares the
median of the first third with the usual value. It counts only from MIN_STEPS steps on, if it is as large as the check asks, and
if chance does not explain it: at least 3 of 4 pairs of a step of the first and a step of the last third must be ordered alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from topd.report.stored import StoredRun, number
from topd.report.stored_step import StoredStep
from topd.run.catalogue import NAMES
from topd.run.healthy import HEALTHY, of_case

LEVELS = ("bad", "warning", "note", "good")
"""Worst first."""

MIN_STEPS = 4
"""With fewer steps nothing is said about changes."""

_MAX_RECENT = 10
_ORDERED = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number behind a verdict: Evidence(label="mean length", value="211 tokens", steps=(12, 16))."""

    label: str
    value: str
    steps: tuple[int, int] | None = None
    """First and last step it is about; None if it is about the whole run."""

    @property
    def where(self) -> str:
        return span(self.steps) if self.steps else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`words` says what was seen, `advice` what to try (empty where nothing is wrong), `metrics` what it rests on."""

    level: str
    title: str
    words: str
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The steps that have a number, and the numbers."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def range(self) -> tuple[int, int]:
        return self.steps[0], self.steps[-1]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def usual(self) -> "Series":
        """The last third, which usual values are taken from."""
        return self[-min(_third(len(self)), _MAX_RECENT) :]

    def largest(self) -> tuple[int, float]:
        """Step and value."""
        return max(zip(self.steps, self.values, strict=True), key=lambda at: at[1])

    def __getitem__(self, part: slice) -> "Series":
        return Series(steps=self.steps[part], values=self.values[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The first third of a series against the last third, see the rules above."""

    early: Series
    late: Series

    @property
    def before(self) -> float:
        return self.early.median

    @property
    def after(self) -> float:
        return self.late.median

    @property
    def relative(self) -> float:
        """The change as a share of the size before; 0 where there was nothing before."""
        return (self.after - self.before) / abs(self.before) if self.before else 0.0

    def rises(self, share: float) -> bool:
        """By at least this share of the size before."""
        return self.after > self.before and self.after - self.before >= share * abs(self.before) and self._ordered(1) >= _ORDERED

    def falls(self, share: float) -> bool:
        return self.after < self.before and self.before - self.after >= share * abs(self.before) and self._ordered(-1) >= _ORDERED

    def _ordered(self, sign: int) -> float:
        pairs = [sign * (late - early) > 0 for early in self.early.values for late in self.late.values]
        return sum(pairs) / len(pairs)

    def words(self, unit: str = "") -> str:
        unit = f" {unit}" if unit else ""
        return (
            f"from {figure(self.before)}{unit} (median of {span(self.early.range)}) "
            f"to {figure(self.after)}{unit} (median of {span(self.late.range)})"
        )

    def evidence(self, label: str) -> tuple[Evidence, Evidence]:
        return at_median(label, self.early), at_median(label, self.late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Input of the checks: a run, and the rollouts of some of its steps."""

    run: StoredRun
    rollouts: Sequence[StoredStep] = ()

    def series(self, metric: str) -> Series:
        assert metric in NAMES, f"{metric} is not in the catalogue"
        points = [
            (row["step"], value)
            for row, value in zip(self.run.metrics, self.run.series(metric), strict=True)
            if value is not None and isinstance(row.get("step"), int)
        ]
        return Series(steps=tuple(step for step, _ in points), values=tuple(value for _, value in points))

    def change(self, metric: str) -> Change | None:
        return change(self.series(metric))

    def usual(self, metric: str) -> float | None:
        """Median of the last third; of all there is, if that is less than a third should have."""
        series = self.series(metric).usual
        return series.median if len(series) else None

    def total(self, metric: str) -> float:
        return sum(self.series(metric).values, start=0.0)

    def has(self, *metrics: str) -> bool:
        """True if any of them has a number."""
        return any(len(self.series(metric)) for metric in metrics)

    def setting(self, key: str) -> float | None:
        return number(self.run.setting(key))

    @property
    def sampled(self) -> bool:
        """False where the completions are demonstrations: an update happened, and no policy was sampled from."""
        return self.has("policy/entropy", "ratio/p50") or not self.has("train/loss")

    @property
    def taught(self) -> bool:
        """True if a teacher scored."""
        return self.has("teacher/gap", "token_reward/floor_share")


def change(series: Series) -> Change | None:
    """None with too few steps."""
    if len(series) < MIN_STEPS:
        return None
    return Change(early=series[: _third(len(series))], late=series.usual)


def previous(series: Series) -> Change | None:
    """The third before the last against the last; None where there are not three of them."""
    third = _third(len(series))
    if len(series) < 3 * MIN_STEPS:
        return None
    return Change(early=series[third : 2 * third], late=series.usual)


def judged(
    level: str,
    title: str,
    words: str,
    *metrics: str,
    evidence: Iterable[Evidence] = (),
    case: str = "",
    advice: str | None = None,
) -> Verdict:
    """A verdict; where something is wrong, with what run/healthy.py says of the first metric.

    That is its meaning (of a note only with a `case`, if it tells cases apart) and its advice, unless other `advice` is given.
    """
    healthy = HEALTHY.get(metrics[0]) if metrics and advice is None and level != "good" else None
    if healthy is not None:
        words += "" if level == "note" and not case else f" {of_case(healthy.outside, case)}"
        advice = of_case(healthy.advice, case)
    return Verdict(level=level, title=title, words=words, evidence=tuple(evidence), advice=advice or "", metrics=metrics)


def ranged(name: str) -> Callable[[Watched], Iterator[Verdict]]:
    """The check that a usual value is in its range, with the sentences of run/healthy.py."""

    def check(watched: Watched) -> Iterator[Verdict]:
        healthy, series = HEALTHY[name], watched.series(name)
        says, usual = healthy.says, series.usual
        if says is None or not len(usual) or not watched.sampled:
            return
        value, inside, setting = usual.median, healthy.holds(usual.median), watched.setting(says.setting)
        known = {"value": figure(value), "percent": percent(value), "over": of_usual(usual), "expected": healthy.expected}
        words = says.words.format(**known, setting="?" if setting is None else figure(setting))
        step, most = series.largest()
        largest = Evidence(label="largest share", value=percent(most), steps=(step, step))
        level = "good" if inside else "bad" if value > says.severe else "warning"
        evidence = [largest] if says.largest else medians(watched, name)
        yield judged(level, says.inside if inside else says.outside, words, name, evidence=evidence)

    check.__name__ = name
    return check


def at_median(label: str, series: Series) -> Evidence:
    kind = "median " if len(series) > 1 else ""
    return Evidence(label=f"{kind}{label}", value=figure(series.median), steps=series.range)


def medians(watched: Watched, *metrics: str) -> Iterator[Evidence]:
    """The usual values of those that have one."""
    for metric in metrics:
        if len(series := watched.series(metric).usual):
            yield at_median(metric, series)


def figure(value: float) -> str:
    """Three digits, or whole numbers with separators."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) >= 0.0005 or not share else f"{100 * share:.1g} %"


def span(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"steps {first} to {last}"


def of_usual(series: Series) -> str:
    """Steps of a usual value, in words."""
    return f"{span(series.range)} alone" if len(series) == 1 else f"median of {span(series.range)}"


def _third(num_steps: int) -> int:
    return max(2, num_steps // 3)
