"""From a completion to a grade in [0, 1]: find the answer, score it, and never let one completion stop a run."""

import logging
import re
from collections.abc import Callable

from topd.tasks.task import Problem, Score

_log = logging.getLogger(__name__)


def exact(answer: str, problem: Problem) -> float:
    """1 if the answer equals the right one, apart from surrounding white space."""
    return float(problem.answer is not None and answer.strip() == problem.answer.strip())


def math_verify(answer: str, problem: Problem) -> float:
    """1 if the answer is mathematically equal to the right one (math-verify): 0.5 and \\frac{1}{2}, and so on."""
    from math_verify import parse, verify

    return float(verify(parse(f"${problem.answer}$"), parse(answer)))


SCORERS: dict[str, Score] = {"exact": exact, "math_verify": math_verify}


class Grader:
    """Grades completions of one task. Errors of the scorer are counted, and the first is logged."""

    def __init__(self, score: Score, answer_pattern: str | None) -> None:
        self._score = score
        self._find = answer_finder(answer_pattern)
        self.num_errors = 0

    def grade(self, completion: str, problem: Problem) -> float:
        """The score of the answer found in `completion`; 0 if there is none, no right answer is known, or the scorer raises."""
        answer = self._find(completion)
        if answer is None or problem.answer is None:
            return 0.0
        try:
            score = self._score(answer, problem)
        except Exception as error:  # any completion may hit any bug of a scorer; it is data, not a crash
            if not self.num_errors:
                _log.warning("a grader raised %s: %s; such completions get reward 0 and are counted", type(error).__name__, error)
            self.num_errors += 1
            return 0.0
        return min(max(float(score), 0.0), 1.0)


def answer_finder(pattern: str | None) -> Callable[[str], str | None]:
    """Function from a completion to the last match of `pattern`'s group, or to the whole text without a pattern."""
    if pattern is None:
        return lambda completion: completion
    compiled = re.compile(pattern, re.DOTALL)

    def find(completion: str) -> str | None:
        matches = compiled.findall(completion)
        return matches[-1] if matches else None

    return find
