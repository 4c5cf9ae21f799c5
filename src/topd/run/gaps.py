"""Gaps in the records of a run, one sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topd.run.files import spans

_LEFT_OUT = {
    "without_answer": "left out without an answer",
    "duplicates": "left out as duplicate",
    "max_problems": "left out by eval.max_problems",
}


def lost_steps(rows: Sequence[Mapping[str, Any]], steps_done: int) -> Iterator[str]:
    """Steps without a row in metrics.jsonl."""
    recorded = {row["step"] for row in rows}
    if lost := [step for step in range(1, steps_done + 1) if step not in recorded]:
        yield f"metrics.jsonl lacks steps {spans(lost)}: curves and totals are without them"


def lost_evaluations(
    rows: Sequence[Mapping[str, Any]], due: Mapping[str, Sequence[str]], steps_done: int, *, every: int
) -> Iterator[str]:
    """Evaluations before step `steps_done` without a row in evals.jsonl. `due`: benchmark -> models; `every`: in steps."""
    recorded = {(row["model"], row["benchmark"], row["step"]) for row in rows}
    steps = [step for step in range(steps_done) if step == 0 or (every and step % every == 0)]
    for name, models in due.items():
        for model in models:
            if lost := [step for step in (steps if model == "student" else steps[:1]) if (model, name, step) not in recorded]:
                yield f"evals.jsonl lacks the {model} on {name} at steps {spans(lost)}"


def excluded(row: Mapping[str, Any]) -> str:
    """Problems that a row of evals.jsonl does not sample, as "2 left out as duplicate, 1 too long, counted as wrong"."""
    left_out = row.get("left_out")
    counts = left_out if isinstance(left_out, Mapping) else {}
    parts = [f"{counts[name]} {words}" for name, words in _LEFT_OUT.items() if counts.get(name)]
    if row.get("too_long"):
        parts.append(f"{row['too_long']} too long, counted as wrong")
    return ", ".join(parts)
