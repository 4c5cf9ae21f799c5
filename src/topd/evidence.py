"""The table of evidence: all that an algorithm may ask for, by name. Imports nothing heavy, as readers of run folders use it too.

A new stream is a row here, a producer (an engine, the grader or a teacher) and a reader (an algorithm). Joining, cutting,
storing and reading follow the table.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One entry of the table. Log-probs are in nats."""

    axes: Literal["rollout", "token", "token k"]
    """One number per completion, one per token, or k per token."""
    source: Literal["grader", "student", "teacher"]
    meaning: str
    integer: bool = False


EVIDENCE = {
    "grades": Stream(axes="rollout", source="grader", meaning="grade of each completion, in [0, 1]; 0 where nothing was graded"),
    "behaviour_logprobs": Stream(
        axes="token",
        source="student",
        meaning="the student's side of the reward, computed by the same kind of engine as the teacher's",
    ),
    "old_logprobs": Stream(
        axes="token", source="student", meaning="the denominator of the importance ratio (collect/score.py, ratio_logprobs)"
    ),
    "teacher_logprobs": Stream(axes="token", source="teacher", meaning="the teacher's log-prob of the sampled token"),
    "teacher_top_ids": Stream(
        axes="token k", source="teacher", meaning="the teacher's k most likely tokens, best first", integer=True
    ),
    "teacher_top_logprobs": Stream(axes="token k", source="teacher", meaning="their log-probs"),
}

PROMPT_FIELDS = {"answers": "answer", "demonstrations": "demonstration"}
"""Needs that prompts fulfil, and the field of `Prompt` for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Streams requested of a teacher."""

    streams: Set[str] = frozenset({"teacher_logprobs"})
    top_k: int = 0
    """k of the streams with axes [token, k]."""


def of_teacher(needs: Set[str]) -> frozenset[str]:
    """Streams of `needs` that a teacher gives."""
    return frozenset(name for name in needs if name in EVIDENCE and EVIDENCE[name].source == "teacher")
