"""Comparison of an answer with the right one: `task.grader`. The rule and its decisions are written down in docs/data.md."""

import dataclasses
import functools
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from topd.tasks.answers import AROUND, EMPHASIS, WRAPPED, last_boxed
from topd.tasks.task import Problem


def exact(answer: str, problem: Problem) -> float:
    """1 if the answer equals the right one, apart from surrounding white space."""
    return float(problem.answer is not None and answer.strip() == problem.answer.strip())


def math_verify(answer: str, problem: Problem) -> float:
    """1 if the answer is the right one to the letter, or mathematically equal: 0.5 and \\frac{1}{2}, and so on.

    Decimal numbers and lists of them are compared exactly; words, dates, names and numbers of another base as text; everything
    else by math-verify, which is given the answer alone. Raises whatever math-verify raises.
    """
    assert problem.answer is not None
    return _equal(normal(last_boxed(problem.answer) or problem.answer), normal(answer))


SAME = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms
    | {"\u3000": " ", "\u00a0": " ", "\u2212": "-", "\u2013": "-", "\u3002": ".", "\u00f7": "/", "\u00d7": r"\times "}
    | {"\u00b7": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b2": "^2", "\u00b3": "^3"}
    | {"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"}
    | dict.fromkeys("\u20ac\u00a3\u00a5\u200b", "")  # euro, pound and yen, like the dollar; a space without width
)
"""Characters that are written differently and mean the same."""
MATH_MARKS = re.compile(r"\\\(|\\\)|\\\[|\\\]|\\?\$")
NAMES = {"pi": r"\pi", "infinity": r"\infty", r"\varnothing": r"\emptyset"}
SPACED = re.compile(r"(?<=\d)(?:\\[,!:; ]|~)(?=\d{3}(?!\d))")
GROUPED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
SCIENTIFIC = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])")
MIXED = re.compile(r"(?<![\w.])(\d+)\s+(\d+)/(\d+)(?![\w.])")
POWER_OF_TEN = r"\s*\\(?:times|cdot)\s*10\^\{?([+-]?\d{1,4})\}?"
NUMBER = re.compile(rf"[+-]?\s*(?:\d{{1,3}}(?:,\d{{3}})+|\d+)?(?:\.\d+|\.)?(?:{POWER_OF_TEN})?")
CHOICE = re.compile(r"\(?([A-Za-z])[).:]?")
CHOSEN = re.compile(r"\(?([A-Za-z])[).:](?:\\?\s.*)?", re.DOTALL)
PERCENT = re.compile(r"(.*[\d}])\s*(?:\\?%|per\s?cent)", re.DOTALL)
DEGREES = re.compile(r"(?<=\d)\s*(?:\u00b0|\^\s*\{?\s*\\circ\s*\}?|\\degree)")

SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
CHANGING = "|".join(("are|dozen|even|false|half|hundred|if|is|mod|no|none|not|odd|per|percent|then|true", *SCALES))
"""Words after a number that change what it says."""
NO_UNIT = rf"(?!(?:{CHANGING}|and|cos|det|exp|gcd|lcm|log|max|or|pi|sin|tan|to|union)\b)"
ABBREVIATION = "mm|cm|dm|km|nm|mg|kg|ml|mL|lb|oz|ft|kWh?|Hz|GB|MB|mph"
"""Units that may touch their number; other letters there are a product, as in 3xy."""
UNIT = (
    rf"(?:(?:{ABBREVIATION})|(?<=[\s/])(?:in|mi|hr|yd|kJ|Pa|[mgshLWJV])|(?<=[\s/]){NO_UNIT}[^\W\d_]{{3,}})"
    r"(?:\s*\^\s*\{?-?[1-4]\}?)?"
)
MEASURED = re.compile(
    rf"([+-]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s+\d+/\d+|\s*/\s*\d+|\s*\\[dt]?frac\s*\{{\d+\}}\{{\d+\}}|{POWER_OF_TEN})?"
    rf"|[+-]?\\[dt]?frac\s*\{{\d+\}}\{{\d+\}})(?:\s+({'|'.join(SCALES)})\b)?"
    rf"(?:\s*{UNIT}(?:\s*(?:/|\b(?:per|an?|of)\b|\s)\s*{UNIT})?)?"
)
"""A number or a fraction with its unit: one word, or two, as in `miles per hour` and `m/s^2`."""
TRAILING = re.compile(rf"(.*\d.*?)(?:\s*{WRAPPED.pattern}|(?<=[\s}}])(?:{ABBREVIATION}))(?:\s*\^\s*\{{?-?[1-4]\}}?)?", re.DOTALL)
"""Any expression with a unit that is set as text, or abbreviated."""
CHANGES = re.compile(rf"\b(?:{CHANGING}|and|or)\b", re.IGNORECASE)
MORE = re.compile(rf"[+-]?[\d.,]+\s.*\b(?:{CHANGING})\b.*", re.IGNORECASE)
"""A number and words that change what it says."""

WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*|[^\W\d_](?:[\s'-]+[^\W\d_]+)+")
AS_TEXT = re.compile(
    r".*\d_\{?\w.*"  # another base
    r"|\d+(?:\.\d+){2,}|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}"  # addresses, dates
    r"|\d+(?::\d+)+(?:\s*[ap]\.?m\.?)?"  # times and ratios
    r"|[A-Za-z]+\d\w*|\d+[A-Za-z]+\d\w*"  # names
    r"|.*\\[bp]?mod\b.*",
    re.IGNORECASE,
)
"""No arithmetic, though math-verify would do it: of dates it makes differences, of names products of letters in any order."""
RANGE = re.compile(r"\d+-\d+")
LIST = re.compile(r"[+-]?[\d.]+(?:\s+[+-]?[\d.]+)+")
DIGITS = 1.01e-6
"""Relative difference of two numbers that agree to six digits."""


def normal(answer: str) -> str:
    """An answer without what does not change its meaning: dollar signs, emphasis, a final full stop, full-width digits, units."""
    text = EMPHASIS.sub(r"\1", MATH_MARKS.sub("", answer.translate(SAME))).strip(AROUND)
    text = text.removeprefix("=").removesuffix(".").strip(AROUND)
    if whole := WRAPPED.fullmatch(text):
        text = whole[1].strip()
    if choice := CHOICE.fullmatch(text):
        return choice[1]
    text = SPACED.sub("", DEGREES.sub("", text.replace(r"\langle", "(").replace(r"\rangle", ")")))
    if GROUPED.fullmatch(text):
        return text.replace(" ", "")
    text = SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", _without_unit(NAMES.get(text.lower(), text)))
    return MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _without_unit(text: str) -> str:
    """A number or expression without its unit, and with `million` as a power of ten; all else as it is."""
    plain = _plain(text)
    if match := MEASURED.fullmatch(plain):
        return match[1] if match[3] is None else rf"{match[1]} \cdot 10^{{{SCALES[match[3]]}}}"
    trailing = None if AS_TEXT.fullmatch(plain) else TRAILING.fullmatch(text)
    return text if trailing is None or CHANGES.search(trailing[2] or "") else trailing[1].strip()


def _plain(text: str) -> str:
    """Words set as text, as plain ones."""
    return " ".join(re.sub(r"\\[,;: !]|~", " ", WRAPPED.sub(r" \1 ", text)).split())


@functools.lru_cache(maxsize=4096)
def _equal(right: str, answer: str) -> float:
    if not answer or not right:
        return 0.0
    if answer == right:
        return 1.0
    percents = PERCENT.fullmatch(right), PERCENT.fullmatch(answer)
    if percents[0] and percents[1]:
        return _equal(percents[0][1], percents[1][1])
    if percents[0]:
        return max(_equal(percents[0][1], answer), _equal(rf"\frac{{{percents[0][1]}}}{{100}}", answer))
    if percents[1]:
        return max(_equal(right, percents[1][1]), _equal(right, rf"\frac{{{percents[1][1]}}}{{100}}"))
    verdict = _as_numbers(right, answer)
    if verdict is None:
        verdict = _as_text(right, answer)
    return float(_as_mathematics(right, answer) if verdict is None else verdict)


def _as_numbers(right: str, answer: str) -> bool | None:
    """True if two decimal numbers, or lists of them, are equal; None if they are something else."""
    numbers = _number(right), _number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if LIST.fullmatch(right) or LIST.fullmatch(answer):
        return list(map(_number, right.split())) == list(map(_number, answer.split()))
    counts = [Counter(_number(part) for part in re.split(r",\s*", text)) for text in (right, answer)]
    return counts[0] == counts[1] if None not in counts[0] | counts[1] else None


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal number, with thousands commas or a power of ten; None for anything else."""
    match = NUMBER.fullmatch(text)
    if match is None or not re.search(r"\d", text.partition("\\")[0]):
        return None
    digits = text.partition("\\")[0].replace(",", "").replace(" ", "")
    return Fraction(digits.removesuffix(".")) * Fraction(10) ** int(match[1] or 0)


def _as_text(right: str, answer: str) -> bool | None:
    """True if two non-mathematical answers are the same text, ignoring case; None if they are mathematics."""
    texts = right, answer
    if len(right) == 1 and (chosen := CHOSEN.fullmatch(_plain(answer))):
        return right == chosen[1]  # of several choices, with what it says
    if any(WORDS.fullmatch(_plain(text)) or MORE.fullmatch(_plain(text)) for text in texts):
        return _plain(right).casefold() == _plain(answer).casefold()
    if not RANGE.fullmatch(right) and not any(AS_TEXT.fullmatch(_plain(text)) for text in texts):
        return None
    bare = [re.sub(r"[\s{}.]|\\[,;: !]" if ":" in text else r"[\s{}]|\\[,;: !]", "", _plain(text)).casefold() for text in texts]
    if sum("_" in text for text in bare) == 1:  # the base may go without saying
        bare = [text.partition("_")[0] for text in bare]
    return bare[0] == bare[1]


def _as_mathematics(right: str, answer: str) -> bool:
    from math_verify import verify

    def equal(left: Any, other: Any) -> bool:
        close = _close(left, other)
        # without its time limits, which are signals to the main thread; this process has one already
        return verify(left, other, timeout_seconds=None, raise_on_error=True) if close is None else close

    if {_bracket(right), _bracket(answer)} == {"set", "tuple"}:
        return False
    first, equals, second = answer.partition("=")
    if equals and "=" not in second and not re.search(r"[^\W\d_]|[<>\\]\s*$", first):
        return equal(_parsed(right), _parsed(first)) and equal(_parsed(right), _parsed(second))  # 10 = 20 is not 20
    return equal(_parsed(right), _parsed(answer))


def _bracket(text: str) -> str | None:
    """Kind of an enumeration, by its brackets."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    return "tuple" if text[:1] in "([" and text[-1:] in ")]" else None


def _close(right: list[Any], answer: list[Any]) -> bool | None:
    """True if two numbers, one of them a decimal, agree to six digits (math-verify: six places); None for anything else."""
    from sympy import Expr, Float

    values = [parsed[0] for parsed in (right, answer) if parsed and isinstance(parsed[0], Expr)]
    if len(values) < 2 or not all(value.is_number for value in values) or not any(value.has(Float) for value in values):
        return None
    one, other = (complex(value.evalf(15)) for value in values)
    return abs(one - other) <= DIGITS * max(abs(one), abs(other))


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # the whole text is one expression: no search for boxes or numbers inside it. Nor units, among which math-verify counts `ab`.
    alone = LatexExtractionConfig(boxed_match_priority=-1)
    alone = dataclasses.replace(alone, normalization_config=dataclasses.replace(alone.normalization_config, units=False))
    return parse(f"${text}$", extraction_config=[alone], parsing_timeout=None)
