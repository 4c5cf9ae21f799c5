"""Verdicts on how the work went: loss, gradients, groups without signal, what was dropped, lag, speed, memory."""

from collections.abc import Iterator

from topd.report.health.learning import AGREED, CHANGE
from topd.report.health.verdict import (
    MIN_STEPS,
    Evidence,
    Level,
    Series,
    Verdict,
    Watched,
    change,
    figure,
    judged,
    medians,
    of_usual,
    percent,
    span,
)
from topd.run.healthy import HEALTHY, of_case

SPIKE = 10
GREAT_SPIKE = 100
"""Times the median: a gradient norm to mention, and one to worry about even if it is the only one."""

RETRIED = 0.05
DROPPED = 0.01
"""Shares of requests and of groups up to which failures are only mentioned."""

ONE_PHASE = 0.8
"""Share of the time from which one phase is all that matters."""

SLOWER = 0.3
LARGER = 0.25
"""Shares by which throughput must fall, and memory grow, to be mentioned."""


def loss(watched: Watched) -> Iterator[Verdict]:
    """Where no policy is sampled from, the loss is what falls."""
    over = watched.change("train/loss")
    if watched.sampled or over is None:
        return
    words = f"The loss went {over.words()}."
    if over.rises(CHANGE):
        yield judged("bad", "The loss rises", words, "train/loss", evidence=over.evidence("train/loss"))
    elif over.falls(CHANGE):
        yield judged("good", "The loss falls", words, "train/loss", evidence=over.evidence("train/loss"))
    else:
        yield judged("note", "The loss hardly changes", words, "train/loss", evidence=over.evidence("train/loss"))


def gradients(watched: Watched) -> Iterator[Verdict]:
    usual, largest = watched.series("train/grad_norm"), watched.series("train/grad_norm_max")
    if not len(usual) or not len(largest):
        return
    step, most = largest.largest()
    names = ("train/grad_norm_max", "train/grad_norm")
    evidence = (Evidence(label="largest gradient norm", value=figure(most), steps=(step, step)), *medians(watched, names[1]))
    gap = watched.usual("teacher/gap")
    norm = usual.usual.median
    if not HEALTHY["train/grad_norm"].holds(norm) and not (gap is not None and gap < AGREED):
        words = f"The gradient norm is {figure(norm)} ({of_usual(usual.usual)})."
        yield judged("warning", "There is almost no gradient", words, "train/grad_norm", evidence=evidence)
        return
    high = [at for at, value in zip(largest.steps, largest.values, strict=True) if value > SPIKE * usual.median]
    words = f"The largest gradient norm is {figure(most)}, at step {step}, before clipping; the median over {span(usual.range)} "
    words += f"is {figure(usual.median)}."
    if high and len(usual) >= MIN_STEPS:
        words += f" {len(high)} of {len(largest)} steps have one above {SPIKE} times the median."
        level: Level = "warning" if len(high) > 1 or most > GREAT_SPIKE * usual.median else "note"
        advice = HEALTHY["train/grad_norm_max"].advice if level == "note" else None
        yield judged(level, "Gradients spike", words, *names, evidence=evidence, advice=advice)
    else:
        yield judged("good", "Gradients do not spike", words, *names, evidence=evidence)


def signal(watched: Watched) -> Iterator[Verdict]:
    """Groups that teach nothing: all advantages 0, or, without a teacher, all grades alike."""
    without, spread = watched.series("advantage/degenerate_groups").usual, watched.series("grade/std_in_group").usual
    if not watched.sampled:
        return
    if not watched.taught and len(spread) and not HEALTHY["grade/std_in_group"].holds(spread.median):
        words = f"The grades of a group differ by {figure(spread.median)} only (standard deviation, {of_usual(spread)}), and "
        words += "credit comes from nothing else."
        evidence = medians(watched, "grade/std_in_group", "grade/mean")
        yield judged("bad", "All grades of a group are equal", words, "grade/std_in_group", "grade/mean", evidence=evidence)
    elif len(without):
        name = "advantage/degenerate_groups"
        words = f"{percent(without.median)} of the groups have no signal: all their advantages are 0 ({of_usual(without)})."
        fine = HEALTHY[name].holds(without.median)
        title = "Groups carry a signal" if fine else "Most groups carry no signal"
        yield judged("good" if fine else "warning", title, words, name, evidence=medians(watched, name))


def dropped(watched: Watched) -> Iterator[Verdict]:
    lost = watched.series("teacher/dropped_groups")
    if not len(lost):
        return
    count = sum(lost.values)
    prompts = watched.setting("rollout.prompts_per_step")
    of = f" of {figure(prompts * len(lost))}" if prompts else ""
    words = f"{figure(count)}{of} groups were left out over {span(lost.range)}."
    if not count:
        yield judged("good", "No group was dropped", words, "teacher/dropped_groups")
        return
    few = prompts is not None and count <= DROPPED * prompts * len(lost)
    step, most = lost.largest()
    evidence = (Evidence(label="most in one step", value=figure(most), steps=(step, step)),)
    level: Level = "note" if few else "warning"
    advice = HEALTHY["teacher/dropped_groups"].advice if few else None
    yield judged(level, "Groups were dropped", words, "teacher/dropped_groups", evidence=evidence, advice=advice)


def retries(watched: Watched) -> Iterator[Verdict]:
    again, asked = watched.total("teacher/retries"), watched.total("teacher/requests")
    if not watched.has("teacher/requests"):
        return
    words = f"{figure(again)} of {figure(asked)} requests to the teacher's servers were made again."
    names = ("teacher/retries", "teacher/requests")
    if not again:
        yield judged("good", "The teacher's servers answered", words, *names)
    else:
        level: Level = "warning" if again > RETRIED * asked else "note"
        advice = HEALTHY["teacher/retries"].advice if level == "note" else None
        yield judged(level, "The teacher's servers failed at times", words, *names, advice=advice)


def grader(watched: Watched) -> Iterator[Verdict]:
    errors = watched.series("grade/grader_errors")
    if not len(errors):
        return
    prompts, size = watched.setting("rollout.prompts_per_step"), watched.setting("rollout.group_size")
    of = f" of {figure(prompts * size * len(errors))}" if prompts and size else ""
    words = f"The grader raised on {figure(sum(errors.values))}{of} completions over {span(errors.range)}."
    if HEALTHY["grade/grader_errors"].holds(sum(errors.values)):
        yield judged("good", "The grader never raised", words, "grade/grader_errors")
    else:
        yield judged("warning", "The grader raises", words, "grade/grader_errors")


def lag(watched: Watched) -> Iterator[Verdict]:
    """0, or with rollout.max_lag = 1 no more than one step's updates."""
    behind, updates = watched.series("policy/lag").usual, watched.usual("train/updates")
    if not len(behind):
        return
    allowed = (watched.setting("rollout.max_lag") or 0.0) * (updates or 0.0)
    words = f"Completions were sampled by weights {figure(behind.median)} updates old ({of_usual(behind)}); the settings allow "
    words += f"{figure(allowed)}."
    fine = behind.median <= allowed
    title = "Sampling weights are as new as they should be" if fine else "Sampling weights are too old"
    yield judged("good" if fine else "warning", title, words, "policy/lag", evidence=medians(watched, "policy/lag"))


def phases(watched: Watched) -> Iterator[Verdict]:
    whole = watched.total("seconds/step")
    names = ("seconds/rollout", "seconds/teacher", "seconds/update")
    if not whole > 0 or not watched.has(*names):
        return
    shares = {name: watched.total(name) / whole for name in names if watched.has(name)}
    slowest = max(shares, key=lambda name: shares[name])
    steps = watched.series("seconds/step")
    parts = ", ".join(f"{name.removeprefix('seconds/')} {percent(share)}" for name, share in shares.items())
    words = f"Of {figure(whole)} s in {span(steps.range)}: {parts}."
    evidence = [Evidence(label=name, value=f"{figure(watched.total(name))} s", steps=steps.range) for name in shares]
    if watched.sampled and shares[slowest] > ONE_PHASE:
        advice = of_case(HEALTHY["seconds/step"].advice, slowest.removeprefix("seconds/").capitalize())
        yield judged("note", "One phase takes nearly all the time", words, slowest, evidence=evidence, advice=advice)
    else:
        yield judged("good", "Where the time goes", words, slowest, evidence=evidence)


def throughput(watched: Watched) -> Iterator[Verdict]:
    """Completion tokens per second of the whole step: waiting of one phase for another is in it."""
    tokens, seconds = watched.run.series("tokens/rollout"), watched.run.series("seconds/step")
    rows = [
        (row["step"], count / time)
        for row, count, time in zip(watched.run.metrics, tokens, seconds, strict=True)
        if count is not None and time and isinstance(row.get("step"), int)
    ]
    over = change(Series(steps=tuple(step for step, _ in rows), values=tuple(speed for _, speed in rows)))
    if over is None:
        return
    names = ("tokens/rollout", "seconds/step", "completion/mean_length")
    words = f"Speed of whole steps went {over.words('tokens a second')}."
    evidence = (*over.evidence("tokens per second"), *medians(watched, "completion/mean_length"))
    if over.falls(SLOWER):
        advice = HEALTHY["tokens_per_second/rollout"].advice
        yield judged("warning", "The run gets slower", words, *names, evidence=evidence, advice=advice)
    else:
        yield judged("good", "The run does not get slower", words, *names, evidence=evidence)


def memory(watched: Watched) -> Iterator[Verdict]:
    over = watched.change("memory/peak")
    if over is None:
        return
    words = f"Peak memory went {over.words('GiB')}."
    evidence = over.evidence("memory/peak")
    if over.rises(LARGER):
        advice = HEALTHY["memory/peak"].advice
        yield judged("note", "Memory grows", words, "memory/peak", evidence=evidence, advice=advice)
    else:
        yield judged("good", "Memory is steady", words, "memory/peak", evidence=evidence)


CHECKS = (loss, gradients, signal, dropped, retries, grader, lag, phases, throughput, memory)
