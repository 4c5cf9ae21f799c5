"""Verdicts on what a run learned: accuracy, gap to the teacher, grades, length, entropy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topd.report.health.verdict import (
    MIN_STEPS,
    Evidence,
    Verdict,
    Watched,
    figure,
    judged,
    of_usual,
    percent,
    previous,
    ranged,
    span,
)
from topd.report.stored import number
from topd.run.healthy import HEALTHY

CHANGE = 0.1
"""Share by which a gap must change to count as falling or rising."""
STALLED = 0.05
"""A gap that falls by less between the last two thirds has stopped falling."""
AGREED = 0.01
"""Nats per token. Below it student and teacher agree."""
GRADES_FALL = 0.2
"""Grades are noisier than log-probs, so they must change by more."""
GROWTH = 0.5
"""Share by which length or entropy must grow, or length shrink, to be remarkable."""
NO_ANSWER = 0.5
"""Share of completions without an answer from which the form is to blame, not the student."""

Score = Mapping[str, Any]
"""A row of evals.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One benchmark: the student before training, its later scores in order, the teacher."""

    name: str
    base: Score | None
    later: tuple[Score, ...]
    teacher: Score | None

    @property
    def room(self) -> float | None:
        """Distance from the base to a teacher that is clearly better."""
        if self.base is None or self.teacher is None or not _above(self.teacher, self.base):
            return None
        return float(self.teacher["avg_at_k"] - self.base["avg_at_k"])

    def evidence(self, last: Score) -> list[Evidence]:
        named = (("base", self.base), ("student", last), ("teacher", self.teacher))
        return [Evidence(label=f"{name}, {self.name}", value=_said(row), steps=(row["step"],) * 2) for name, row in named if row]


def boards(watched: Watched) -> Iterator[Board]:
    rows = watched.run.evaluations
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        student = sorted((r for r in rows if (r["benchmark"], r["model"]) == (name, "student")), key=lambda row: row["step"])
        teacher = next((row for row in rows if (row["benchmark"], row["model"]) == (name, "teacher")), None)
        base = next((row for row in student if row["step"] == 0), None)
        yield Board(name=name, base=base, later=tuple(row for row in student if row["step"] > 0), teacher=teacher)


def _said(row: Score) -> str:
    return f"{percent(row['avg_at_k'])} [{percent(row['ci95'][0])}, {percent(row['ci95'][1])}]"


def _settings(row: Score) -> str:
    return f"{row.get('problems')} problems, {row.get('k')} samples each"


def _above(one: Score, other: Score) -> bool:
    """The intervals do not overlap. Which problems each got right is not stored in pairs, so overlap shows nothing."""
    return bool(one["ci95"][0] > other["ci95"][1])


def accuracy(watched: Watched) -> Iterator[Verdict]:
    """Student after against before, by non-overlap of the 95 % intervals."""
    both = [(board, board.base, board.later[-1]) for board in boards(watched) if board.base and board.later]
    if not both:
        words = "There are no two evaluations of the student to compare, so nothing is known about accuracy."
        advice = "Set eval.every_steps, or let the run finish."
        yield judged("note", "Accuracy before and after is not there", words, advice=advice)
    for board, base, last in both:
        seen = board.evidence(last)
        words = f"{board.name}: {_said(base)} before training, {_said(last)} after step {last['step']} ({_settings(last)}; 95 % "
        words += "intervals)."
        if _above(last, base):
            closes = " The intervals do not overlap."
            if board.room and board.teacher:
                share = percent((last["avg_at_k"] - base["avg_at_k"]) / board.room)
                closes = f" That closes {share} of the distance to the teacher's {percent(board.teacher['avg_at_k'])}."
            yield judged("good", "Accuracy rose", words + closes, evidence=seen)
        elif _above(base, last):
            advice = "Evaluate more often (eval.every_steps), stop earlier (run.steps), lower trainer.learning_rate."
            yield judged("bad", "Accuracy fell", words, evidence=seen, advice=advice)
        else:
            expected = watched.run.finished and board.room is not None and len(watched.run.metrics) >= MIN_STEPS
            words += " The intervals overlap: no change was shown."
            advice = "Train longer (run.steps), or measure more finely (eval.samples_per_problem, more problems)."
            level = "warning" if expected else "note"
            yield judged(level, "No change of accuracy was shown", words, evidence=seen, advice=advice)


def answers(watched: Watched) -> Iterator[Verdict]:
    """Share of the student's completions without an answer in the graded form."""
    latest = {row["benchmark"]: row for row in watched.run.evaluations if row["model"] == "student"}
    for name, row in latest.items():
        rate = number(row.get("without_answer_rate")) or 0.0
        if rate > NO_ANSWER:
            words = f"{name}: {percent(rate)} of the student's completions hold no answer, so they are graded 0."
            advice = "Ask for \\boxed{} with task.prompt_suffix, or set task.answer_pattern; try the rule with `topd grade`."
            yield judged("warning", "Most completions state no answer", words, advice=advice)


def teacher_is_better(watched: Watched) -> Iterator[Verdict]:
    for board in boards(watched):
        if board.base is None or board.teacher is None:
            continue
        words = f"{board.name}: teacher {_said(board.teacher)}, student before training {_said(board.base)} "
        words += f"({_settings(board.teacher)})."
        advice = "Use another teacher, or prompts of another difficulty (task)."
        if board.room is not None:
            yield judged("good", "The teacher has something to teach", words)
        elif _above(board.base, board.teacher):
            yield judged("bad", "The teacher is worse than the student was", words, advice=advice)
        else:
            words += " The intervals overlap, so on this benchmark there may be nothing to learn."
            yield judged("warning", "The teacher is not clearly better", words, advice=advice)


def best_was_earlier(watched: Watched) -> Iterator[Verdict]:
    for board in boards(watched):
        if len(board.later) < 2:
            continue
        last, best = board.later[-1], max(board.later, key=lambda row: row["avg_at_k"])
        words = f"{board.name}: {_said(best)} after step {best['step']}, {_said(last)} after step {last['step']} "
        words += f"({_settings(last)})."
        if _above(best, last):
            advice = (
                f"Take the checkpoint of step {best['step']} if it was kept (run.keep_checkpoints), or set run.steps to that."
            )
            yield judged("warning", "An earlier step was better", words, evidence=board.evidence(last), advice=advice)
        elif best is not last:
            words += " The intervals overlap, so the last one is not shown to be worse."
            yield judged("good", "No earlier step was clearly better", words)
        else:
            yield judged("good", "The last evaluation is the best", words)


def gap(watched: Watched) -> Iterator[Verdict]:
    name = "teacher/gap"
    if (over := watched.change(name)) is None:
        return
    late, low = previous(watched.series(name)), HEALTHY[name].low
    level, title, case = "good", "The gap to the teacher falls", ""
    words = f"It went {over.words('nats per token')}."
    if low is not None and over.after < low:
        level, title, case = "warning", "The gap to the teacher is negative", "Negative"
        words += " A KL cannot be negative."
    elif over.after < AGREED:
        title = "The student agrees with the teacher"
        words += f" Below {AGREED:g} student and teacher agree on what the student samples."
    elif over.rises(CHANGE):
        level, title, case = "bad", "The gap to the teacher rises", "Rising"
    elif not over.falls(CHANGE):
        level, title, case = "warning", "The gap to the teacher does not fall", "Not falling"
        words += f" That is less than a fall of {percent(CHANGE)} beyond the noise of the steps."
    elif late is not None and late.after > (1 - STALLED) * late.before:
        level, title, case = "note", "The gap fell, then stopped falling", "Not falling"
        words += f" But from {span(late.early.range)} to {span(late.late.range)} it changed by {percent(late.relative)} only."
    yield judged(level, title, words, name, evidence=over.evidence(name), case=case)


def grades(watched: Watched) -> Iterator[Verdict]:
    """Grades of the sampled completions; and whether the student gets closer to the teacher and worse at the task."""
    name = "grade/mean"
    series, over, gap_change = watched.series(name), watched.change(name), watched.change("teacher/gap")
    if not watched.sampled or not len(series):
        return
    fell_in = [board.name for board in boards(watched) if board.base and board.later and _above(board.base, board.later[-1])]
    falls = over is not None and over.falls(GRADES_FALL)
    evidence = over.evidence(name) if over else ()
    words = f"The mean grade of sampled completions went {over.words()}." if over else ""
    if gap_change is not None and gap_change.falls(CHANGE) and (fell_in or falls):
        seen = f"the mean grade went {over.words()}" if falls and over else f"accuracy fell on {', '.join(fell_in)}"
        words = f"The gap went {gap_change.words('nats per token')}, yet {seen}."
        title, evidence = "Closer to the teacher, but less often right", (*gap_change.evidence("teacher/gap"), *evidence)
        yield judged("bad", title, words, name, "teacher/gap", evidence=evidence, case="Falling")
    elif falls:
        yield judged("warning", "Grades fall", words, name, evidence=evidence, case="Falling")
    elif not any(series.values):
        words = f"Every completion of {span(series.range)} earned grade 0. Without answers in the data that is as it should be."
        yield judged("note", "No completion earned a grade", words, name, case="Always 0")
    elif over is not None and over.rises(GRADES_FALL):
        yield judged("good", "Grades rise", words, name, evidence=evidence)


def length(watched: Watched) -> Iterator[Verdict]:
    name = "completion/mean_length"
    over, cut = watched.change(name), watched.series("completion/truncation_rate").usual
    if over is None or not watched.sampled:
        return
    known = (number(board.teacher.get("mean_length")) for board in boards(watched) if board.teacher)
    teacher = next(filter(None, known), None)
    words, evidence = f"Mean length went {over.words('tokens')}.", over.evidence(name)
    if teacher is not None:
        words += f" The teacher's own completions have {figure(teacher)} on held-out problems."
    healthy = HEALTHY["completion/truncation_rate"]
    if len(cut) and not healthy.holds(cut.median):
        words += f" {percent(cut.median)} were cut off ({of_usual(cut)})."
    if over.rises(GROWTH) and not (teacher is not None and over.after <= (1 + GROWTH) * teacher):
        severe = over.relative >= 1 or (len(cut) and healthy.says and cut.median > healthy.says.severe)
        level, title = "bad" if severe else "warning", "Completions run away in length"
        yield judged(level, title, words, name, evidence=evidence, case="Growing")
    elif over.falls(GROWTH) and not (teacher is not None and over.after >= (1 - GROWTH) * teacher):
        yield judged("warning", "Completions collapse in length", words, name, evidence=evidence, case="Shrinking")
    else:
        changed = over.rises(GROWTH) or over.falls(GROWTH)
        title = "Length goes to the teacher's" if changed else "Length is steady"
        yield judged("good", title, words, name, evidence=evidence)


def entropy(watched: Watched) -> Iterator[Verdict]:
    name = "policy/entropy"
    over, usual = watched.change(name), watched.series(name).usual
    if not len(usual):
        return
    now = f"is {figure(usual.median)} nats per token ({of_usual(usual)})"
    words = f"Entropy {'went ' + over.words('nats per token') if over else now}."
    evidence = over.evidence(name) if over else ()
    if not HEALTHY[name].holds(usual.median):
        words += f" Below {figure(HEALTHY[name].low or 0.0)} nearly every token is certain."
        yield judged("warning", "Entropy has collapsed", words, name, evidence=evidence, case="Near 0")
    elif over and over.rises(GROWTH):
        yield judged("warning", "Entropy grows", words, name, evidence=evidence, case="Growing")
    else:
        yield judged("good", "Entropy has neither collapsed nor grown", words, name, evidence=evidence)


truncation = ranged("completion/truncation_rate")
CHECKS = (accuracy, answers, teacher_is_better, best_was_earlier, gap, grades, length, truncation, entropy)
