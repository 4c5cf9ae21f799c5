"""Comparison of an answer with the right one: `task.grader`. The rule and its decisions are written down in docs/data.md."""

import functools
import re
from fractions import Fraction

from topd.tasks.answers import AROUND, WRAPPED, last_boxed
from topd.tasks.task import Problem, Score


def exact(answer: str, problem: Problem) -> float:
    """1 if the answer equals the right one, apart from surrounding white space."""
    return float(problem.answer is not None and answer.strip() == problem.answer.strip())


def math_verify(answer: str, problem: Problem) -> float:
    """1 if the answer is the right one to the letter, or mathematically equal: 0.5 and \\frac{1}{2}, and so on.

    Decimal numbers are compared exactly, words as text without regard to case, everything else by math-verify, which is given the
    answer alone. Raises whatever math-verify raises.
    """
    assert problem.answer is not None
    return _equal(normal(last_boxed(problem.answer) or problem.answer), normal(answer))


SCORERS: dict[str, Score] = {"exact": exact, "math_verify": math_verify}

SAME = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms
    | {"\u3000": " ", "\u00a0": " ", "\u2212": "-", "\u2013": "-", "\u3002": ".", "\u00f7": "/", "\u00d7": r"\times "}
    | {"\u00b7": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b2": "^2", "\u00b3": "^3"}
)
"""Characters that are written differently and mean the same."""
MATH_MARKS = re.compile(r"\\\(|\\\)|\\\[|\\\]|\\?\$")
SCIENTIFIC = re.compile(r"(?<![\w.])([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])")
MIXED = re.compile(r"(?<![\w.])(\d+)\s+(\d+)/(\d+)(?![\w.])")
NUMBER = re.compile(r"[+-]?\s*(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|\.)?(?:\s*\\(?:times|cdot)\s*10\^\{([+-]?\d{1,4})\})?")
CHOICE = re.compile(r"\(?([A-Za-z])[).:]?")
WORDS = re.compile(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*|[^\W\d_]+(?:[\s'-]+[^\W\d_]+)+")


def normal(answer: str) -> str:
    """An answer without what does not change its meaning: dollar signs, emphasis, a final full stop, full-width digits."""
    text = MATH_MARKS.sub("", answer.translate(SAME)).strip(AROUND)
    text = text.removesuffix(".").strip(AROUND)
    if whole := WRAPPED.fullmatch(text):
        text = whole[1].strip()
    if choice := CHOICE.fullmatch(text):
        return choice[1]
    text = SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    return MIXED.sub(r"\1\\frac{\2}{\3}", text)


@functools.lru_cache(maxsize=4096)
def _equal(right: str, answer: str) -> float:
    if not answer or not right:
        return 0.0
    if answer == right:
        return 1.0
    numbers = _number(right), _number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    if WORDS.fullmatch(right) or WORDS.fullmatch(answer):
        # as mathematics a word is a product of its letters, in any order
        return float(_words(right) == _words(answer))
    from math_verify import verify

    # without limits of its own: they are signals for the main thread. The process that runs this has one.
    return float(verify(_parsed(right), _parsed(answer), timeout_seconds=None, raise_on_error=True))


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal number, with thousands commas or a power of ten; None for anything else."""
    match = NUMBER.fullmatch(text)
    if match is None or not re.search(r"\d", text.partition("\\")[0]):
        return None
    digits = text.partition("\\")[0].replace(",", "").replace(" ", "")
    return Fraction(digits.removesuffix(".")) * Fraction(10) ** int(match[1] or 0)


def _words(text: str) -> str:
    return " ".join(WRAPPED.sub(r"\1", text).casefold().split())


def _parsed(text: str) -> list[object]:
    from math_verify import LatexExtractionConfig, parse

    # the whole text is one expression: no search for boxes or numbers inside it
    alone = [LatexExtractionConfig(boxed_match_priority=-1)]
    return parse(f"${text}$", extraction_config=alone, parsing_timeout=None)
