"""Numbers as colours, and as short text that stays aligned: for what is shown in a terminal.

A scale diverges from 0: blue with light letters above, orange with dark letters below, stronger the further away. Blue and orange
stay apart for every kind of colour blindness, and light or dark letters without any colour. The tones are of middle brightness,
so that they read on a light and on a dark terminal; what is close to 0 has the terminal's own colours.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.style import Style

from topd.report.stored_step import Numbers

_ABOVE = tuple(Style(color="#ffffff", bgcolor=tone) for tone in ("#5f6f86", "#3f68a8", "#1f5fc4", "#0047d0"))
_BELOW = tuple(Style(color="#000000", bgcolor=tone) for tone in ("#a39584", "#c99b5c", "#e8922a", "#ff8000"))
_PARTS = (1 / 128, 1 / 32, 1 / 8, 1 / 2)
_PLAIN = Style()

SMALLEST = 0.01

NEAR_ZERO = 0.0005
"""Bound below which a number is written as 0.000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Four tones on each side of 0; `steps` are where they begin, ascending and above 0."""

    steps: tuple[float, ...]

    def level(self, value: float) -> int:
        """0 near 0 and for NaN, otherwise 1 to 4 with the sign of the value; infinite values have the strongest tone."""
        size = sum(abs(value) >= step for step in self.steps)
        return -size if value < 0 else size

    def style(self, value: float) -> Style:
        level = self.level(value)
        return _PLAIN if level == 0 else (_BELOW if level < 0 else _ABOVE)[abs(level) - 1]


def scale_of(streams: Iterable[Numbers]) -> Scale:
    """The scale of some tokens: its strongest tone begins at half of their largest finite |value|, or of SMALLEST if that is
    larger: where nothing is notable, nothing glows."""
    largest = SMALLEST
    for values in streams:
        finite = np.abs(values[np.isfinite(values)])
        largest = max(largest, float(finite.max()) if finite.size else 0.0)
    return Scale(steps=tuple(float(f"{largest * part:.1g}") for part in _PARTS))


def signed(value: float | None) -> str:
    """At most six characters, with the sign: +0.123, -12.34, -inf; "-" if there is no number."""
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return f"{value:+}" if math.isinf(value) else "nan" if math.isnan(value) else "0"
    size = abs(value)
    digits = next((digits for limit, digits in ((9.9995, 3), (99.995, 2), (999.95, 1), (99999.5, 0)) if size < limit), None)
    return f"{value:+.0e}" if digits is None else f"{value:+.{digits}f}"


def ratio(value: float | None) -> str:
    """A ratio of probabilities, at most six characters; small ones with an exponent."""
    if value is None or not math.isfinite(value):
        return signed(value)
    return f"{value:.0e}" if 0 < value < NEAR_ZERO else signed(value).removeprefix("+")
