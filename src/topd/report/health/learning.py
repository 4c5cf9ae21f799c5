"""Verdicts on what a run learned: accuracy, gap to the teacher, grades, length, entropy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topd.report.health.verdict import (
    MIN_STEPS,
    Change,
    Evidence,
    Level,
    Verdict,
    Watched,
    figure,
    judged,
    of_usual,
    percent,
    previous,
    span,
)
from topd.report.stored import number
from topd.run.healthy import HEALTHY

CHANGE = 0.1
"""Share by which a gap must change to count as falling or rising."""

STALLED = 0.05
"""A gap that falls by less between the last two thirds has stopped falling."""

AGREED = 0.01
"""Nats per token. Below it student and teacher agree, and nothing is left to fall."""

GRADES_FALL = 0.2
"""Grades are noisier than log-probs, so they must change by more."""

GROWTH = 0.5
"""Share by which length or entropy must grow, or length shrink, to be remarkable."""

LARGE_TRUNCATION = 0.3
"""A rule of thumb: with so many completions cut off, grades and end tokens say little."""

NO_ANSWER = 0.5
"""Share of completions without an answer from which the form is to blame, not the student."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """avg@k of one model on one benchmark."""

    step: int
    value: float
    low: float
    high: float
    settings: str
    mean_length: float | None

    def __str__(self) -> str:
        return f"{percent(self.value)} [{percent(self.low)}, {percent(self.high)}]"

    def above(self, other: "Score") -> bool:
        """The intervals do not overlap. Which problems each got right is not stored in pairs, so overlap shows nothing."""
        return self.low > other.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One benchmark: the student before training, its later scores in order, the teacher."""

    name: str
    base: Score | None
    later: tuple[Score, ...]
    teacher: Score | None

    @property
    def room(self) -> float | None:
        """How far the base is from a teacher that is clearly better."""
        if self.base is None or self.teacher is None or not self.teacher.above(self.base):
            return None
        return self.teacher.value - self.base.value


def boards(watched: Watched) -> list[Board]:
    found: dict[str, dict[str, list[Score]]] = {}
    for row in watched.run.evaluations:
        if (score := _score(row)) is not None:
            found.setdefault(str(row.get("benchmark")), {}).setdefault(str(row.get("model")), []).append(score)
    return [_board(name, models) for name, models in found.items()]


def _board(name: str, models: Mapping[str, list[Score]]) -> Board:
    student = sorted(models.get("student", []), key=lambda score: score.step)
    return Board(
        name=name,
        base=next((score for score in student if score.step == 0), None),
        later=tuple(score for score in student if score.step > 0),
        teacher=next(iter(models.get("teacher", [])), None),
    )


def _score(row: Mapping[str, Any]) -> Score | None:
    interval = row.get("ci95")
    ends = interval if isinstance(interval, list) and len(interval) == 2 else [None, None]
    value, low, high = number(row.get("avg_at_k")), number(ends[0]), number(ends[1])
    if value is None or low is None or high is None or not isinstance(row.get("step"), int):
        return None
    settings = f"{row.get('problems')} problems, {row.get('k')} samples each"
    return Score(step=row["step"], value=value, low=low, high=high, settings=settings, mean_length=number(row.get("mean_length")))


def accuracy(watched: Watched) -> Iterator[Verdict]:
    """Student after against before, by non-overlap of the 95 % intervals."""
    found = boards(watched)
    if not any(board.base and board.later for board in found):
        words = "There are no two evaluations of the student to compare, so nothing is known about accuracy."
        yield judged(
            "note", "Accuracy before and after is not there", words, advice="Set eval.every_steps, or let the run finish."
        )
    for board in found:
        if board.base is None or not board.later:
            continue
        base, last = board.base, board.later[-1]
        words = f"{board.name}: {base} before training, {last} after step {last.step} ({last.settings}; 95 % intervals)."
        if last.above(base):
            yield judged("good", "Accuracy rose", words + _closed(board, last), evidence=_scores(board, last))
        elif base.above(last):
            advice = "Evaluate more often (eval.every_steps), stop earlier (run.steps), lower trainer.learning_rate."
            yield judged("bad", "Accuracy fell", words, evidence=_scores(board, last), advice=advice)
        else:
            expected = watched.run.finished and board.room is not None and len(watched.run.metrics) >= MIN_STEPS
            level: Level = "warning" if expected else "note"
            words += " The intervals overlap: no change was shown."
            advice = "Train longer (run.steps), or measure more finely (eval.samples_per_problem, more problems)."
            yield judged(level, "No change of accuracy was shown", words, evidence=_scores(board, last), advice=advice)


def answers(watched: Watched) -> Iterator[Verdict]:
    """Whether the student's completions state answers at all, in the form that is graded."""
    latest = {str(row.get("benchmark")): row for row in watched.run.evaluations if row.get("model") == "student"}
    for name, row in latest.items():
        rate = number(row.get("without_answer_rate"))
        if rate is not None and rate > NO_ANSWER:
            words = (
                f"{name}: {percent(rate)} of the student's completions hold no answer, so they are graded 0 whatever they say."
            )
            advice = "Ask for \\boxed{} with task.prompt_suffix, or set task.answer_pattern; try the rule with `topd grade`."
            yield judged("warning", "Most completions state no answer", words, advice=advice)


def _closed(board: Board, last: Score) -> str:
    if board.base is None or board.teacher is None or not board.room:
        return " The intervals do not overlap."
    share = (last.value - board.base.value) / board.room
    return f" That closes {percent(share)} of the distance to the teacher's {percent(board.teacher.value)}."


def _scores(board: Board, last: Score) -> list[Evidence]:
    named = (("base", board.base), ("student", last), ("teacher", board.teacher))
    return [
        Evidence(label=f"{name}, {board.name}", value=str(score), steps=(score.step, score.step))
        for name, score in named
        if score
    ]


def teacher_is_better(watched: Watched) -> Iterator[Verdict]:
    for board in boards(watched):
        if board.base is None or board.teacher is None:
            continue
        words = f"{board.name}: teacher {board.teacher}, student before training {board.base} ({board.teacher.settings})."
        advice = "Use another teacher, or prompts of another difficulty (task)."
        if board.room is not None:
            yield judged("good", "The teacher has something to teach", words)
        elif board.base.above(board.teacher):
            yield judged("bad", "The teacher is worse than the student was", words, advice=advice)
        else:
            words += " The intervals overlap, so on this benchmark there may be nothing to learn."
            yield judged("warning", "The teacher is not clearly better", words, advice=advice)


def best_was_earlier(watched: Watched) -> Iterator[Verdict]:
    for board in boards(watched):
        if len(board.later) < 2:
            continue
        last, best = board.later[-1], max(board.later, key=lambda score: score.value)
        words = f"{board.name}: {best} after step {best.step}, {last} after step {last.step} ({last.settings})."
        if best.above(last):
            advice = f"Take the checkpoint of step {best.step} if it was kept (run.keep_checkpoints), or set run.steps to that."
            yield judged("warning", "An earlier step was better", words, evidence=_scores(board, last), advice=advice)
        elif best is not last:
            words += " The intervals overlap, so the last one is not shown to be worse."
            yield judged("good", "No earlier step was clearly better", words)
        else:
            yield judged("good", "The last evaluation is the best", words)


def gap(watched: Watched) -> Iterator[Verdict]:
    series = watched.series("teacher/gap")
    over = watched.change("teacher/gap")
    if over is None:
        return
    evidence = over.evidence("teacher/gap")
    words = f"It went {over.words('nats per token')}."
    low = HEALTHY["teacher/gap"].low
    if low is not None and over.after < low:
        words += " A KL cannot be negative."
        yield judged("warning", "The gap to the teacher is negative", words, "teacher/gap", evidence=evidence, case="Negative")
    elif over.after < AGREED:
        words += f" Below {AGREED:g} student and teacher agree on what the student samples."
        yield judged("good", "The student agrees with the teacher", words, "teacher/gap", evidence=evidence)
    elif over.rises(CHANGE):
        yield judged("bad", "The gap to the teacher rises", words, "teacher/gap", evidence=evidence, case="Rising")
    elif not over.falls(CHANGE):
        words += f" That is no fall of {percent(CHANGE)} or more beyond the noise of the steps."
        yield judged(
            "warning", "The gap to the teacher does not fall", words, "teacher/gap", evidence=evidence, case="Not falling"
        )
    elif (late := previous(series)) is not None and late.after > (1 - STALLED) * late.before:
        words += f" But from {span(late.early.range)} to {span(late.late.range)} it changed by {percent(late.relative)} only."
        yield judged("note", "The gap fell, then stopped falling", words, "teacher/gap", evidence=evidence, case="Not falling")
    else:
        yield judged("good", "The gap to the teacher falls", words, "teacher/gap", evidence=evidence)


def grades(watched: Watched) -> Iterator[Verdict]:
    """Grades of the sampled completions; and whether the student gets closer to the teacher and worse at the task."""
    series, over, gap_change = watched.series("grade/mean"), watched.change("grade/mean"), watched.change("teacher/gap")
    if not watched.sampled or not len(series):
        return
    fell_in = [board.name for board in boards(watched) if board.base and board.later and board.base.above(board.later[-1])]
    grades_fall = over is not None and over.falls(GRADES_FALL)
    if gap_change is not None and gap_change.falls(CHANGE) and (fell_in or grades_fall):
        seen = f"the mean grade went {over.words()}" if grades_fall and over else f"accuracy fell on {', '.join(fell_in)}"
        words = f"The gap went {gap_change.words('nats per token')}, yet {seen}."
        evidence = (*gap_change.evidence("teacher/gap"), *(over.evidence("grade/mean") if over else ()))
        title, names = "Closer to the teacher, but less often right", ("grade/mean", "teacher/gap")
        yield judged("bad", title, words, *names, evidence=evidence, case="Falling")
    elif grades_fall and over:
        words = f"The mean grade of sampled completions went {over.words()}."
        yield judged("warning", "Grades fall", words, "grade/mean", evidence=over.evidence("grade/mean"), case="Falling")
    elif not any(series.values):
        words = f"Every completion of {span(series.range)} earned grade 0. Without answers in the data that is as it should be."
        yield judged("note", "No completion earned a grade", words, "grade/mean", case="Always 0")
    elif over is not None and over.rises(GRADES_FALL):
        words = f"The mean grade of sampled completions went {over.words()}."
        yield judged("good", "Grades rise", words, "grade/mean", evidence=over.evidence("grade/mean"))


def length(watched: Watched) -> Iterator[Verdict]:
    over, cut = watched.change("completion/mean_length"), watched.series("completion/truncation_rate").usual
    if over is None or not watched.sampled:
        return
    teacher = next((b.teacher.mean_length for b in boards(watched) if b.teacher and b.teacher.mean_length), None)
    words = f"Mean length went {over.words('tokens')}."
    if teacher is not None:
        words += f" The teacher's own completions have {figure(teacher)} on held-out problems."
    if len(cut) and not HEALTHY["completion/truncation_rate"].holds(cut.median):
        words += f" {percent(cut.median)} were cut off ({of_usual(cut)})."
    evidence = over.evidence("completion/mean_length")
    if over.rises(GROWTH) and not (teacher is not None and over.after <= (1 + GROWTH) * teacher):
        level: Level = "bad" if over.relative >= 1 or (len(cut) and cut.median > LARGE_TRUNCATION) else "warning"
        yield judged(level, "Completions run away in length", words, "completion/mean_length", evidence=evidence, case="Growing")
    elif over.falls(GROWTH) and not (teacher is not None and over.after >= (1 - GROWTH) * teacher):
        yield judged(
            "warning", "Completions collapse in length", words, "completion/mean_length", evidence=evidence, case="Shrinking"
        )
    else:
        yield judged("good", _steady(over), words, "completion/mean_length", evidence=evidence)


def _steady(over: Change) -> str:
    return "Length goes to the teacher's" if over.rises(GROWTH) or over.falls(GROWTH) else "Length is steady"


def truncation(watched: Watched) -> Iterator[Verdict]:
    name = "completion/truncation_rate"
    usual = watched.series(name).usual
    if not len(usual) or not watched.sampled:
        return
    limit = watched.setting("rollout.max_completion_tokens")
    at = f" at {figure(limit)} tokens" if limit else ""
    words = f"{percent(usual.median)} of the completions were cut off{at} ({of_usual(usual)})."
    step, most = watched.series(name).largest()
    evidence = (Evidence(label="largest share", value=percent(most), steps=(step, step)),)
    if HEALTHY[name].holds(usual.median):
        words += f" The most was {percent(most)}, at step {step}." if most else ""
        yield judged("good", "Few completions are cut off", words, name, evidence=evidence)
    else:
        level: Level = "bad" if usual.median > LARGE_TRUNCATION else "warning"
        yield judged(level, "Completions are cut off", words, name, evidence=evidence)


def entropy(watched: Watched) -> Iterator[Verdict]:
    name = "policy/entropy"
    over, usual = watched.change(name), watched.series(name).usual
    if not len(usual):
        return
    now = f"{figure(usual.median)} nats per token ({of_usual(usual)})"
    words = f"Entropy went {over.words('nats per token')}." if over else f"Entropy is {now}."
    evidence = over.evidence(name) if over else ()
    if not HEALTHY[name].holds(usual.median):
        words += f" Below {figure(HEALTHY[name].low or 0.0)} nearly every token is certain."
        yield judged("warning", "Entropy has collapsed", words, name, evidence=evidence, case="Near 0")
    elif over and over.rises(GROWTH):
        yield judged("warning", "Entropy grows", words, name, evidence=evidence, case="Growing")
    else:
        yield judged("good", "Entropy has neither collapsed nor grown", words, name, evidence=evidence)


CHECKS = (accuracy, answers, teacher_is_better, best_was_earlier, gap, grades, length, truncation, entropy)
