"""From a completion to a grade in [0, 1]: find the answer, score it, and never let one completion stop a run."""

import logging
import re
import threading
from collections.abc import Callable

from topd.tasks.task import Problem, Score

_log = logging.getLogger(__name__)


def exact(answer: str, problem: Problem) -> float:
    """1 if the answer equals the right one, apart from surrounding white space."""
    return float(problem.answer is not None and answer.strip() == problem.answer.strip())


def math_verify(answer: str, problem: Problem) -> float:
    """1 if the answer is the right one to the letter, or mathematically equal (math-verify): 0.5 and \\frac{1}{2}, and so on.

    The answer may be a bare expression (found by task.answer_pattern) or a text that states one, as in \\boxed{...}.
    """
    if exact(answer, problem):
        return 1.0
    from math_verify import parse, verify

    # its time limits use signals, which only the main thread may set
    limit = {} if threading.current_thread() is threading.main_thread() else {"parsing_timeout": None}
    right, bare, stated = (parse(text, **limit) for text in (f"${problem.answer}$", f"${answer}$", answer))
    limit = {} if not limit else {"timeout_seconds": None}
    return float(verify(right, stated, **limit) or ("$" not in answer and verify(right, bare, **limit)))


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
