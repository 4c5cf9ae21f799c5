"""Verdicts on how the work went: loss, gradients, groups without signal, what was dropped, lag, speed, memory."""

from collections.abc import Iterator

from topd.report.health.learning import AGREED, CHANGE
from topd.report.health.verdict import (
    MIN_STEPS,
    Evidence,
    Series,
    Verdict,
    Watched,
    change,
    figure,
    judged,
    medians,
    of_usual,
    percent,
    ranged,
    span,
)
from topd.run.healthy import HEALTHY, of_case

SPIKE, GREAT_SPIKE = 10, 100
"""Times the median: a gradient norm to mention, and one to worry about even if it is the only one."""
RETRIED, DROPPED = 0.05, 0.01
"""Shares of requests and of groups up to which failures are only mentioned."""
ONE_PHASE = 0.8
"""Share of the time from which one phase is all that matters."""
SLOWER, LARGER = 0.3, 0.25
"""Shares by which throughput must fall, and memory grow, to be mentioned."""


def loss(watched: Watched) -> Iterator[Verdict]:
    """Change of the loss, where no policy is sampled from."""
    name = "train/loss"
    over = watched.change(name)
    if watched.sampled or over is None:
        return
    level, title = "note", "The loss hardly changes"
    if over.rises(CHANGE):
        level, title = "bad", "The loss rises"
    elif over.falls(CHANGE):
        level, title = "good", "The loss falls"
    advice = "" if level == "note" else None
    yield judged(level, title, f"The loss went {over.words()}.", name, evidence=over.evidence(name), advice=advice)


def gradients(watched: Watched) -> Iterator[Verdict]:
    usual, largest = watched.series("train/grad_norm"), watched.series("train/grad_norm_max")
    if not len(usual) or not len(largest):
        return
    step, most = largest.largest()
    names = ("train/grad_norm_max", "train/grad_norm")
    evidence = (Evidence(label="largest gradient norm", value=figure(most), steps=(step, step)), *medians(watched, names[1]))
    gap, norm = watched.usual("teacher/gap"), usual.usual.median
    if not HEALTHY["train/grad_norm"].holds(norm) and not (gap is not None and gap < AGREED):
        words = f"The gradient norm is {figure(norm)} ({of_usual(usual.usual)})."
        yield judged("warning", "There is almost no gradient", words, "train/grad_norm", evidence=evidence)
        return
    high = [value for value in largest.values if value > SPIKE * usual.median]
    words = f"The largest gradient norm is {figure(most)}, at step {step}, before clipping; the median over {span(usual.range)} "
    words += f"is {figure(usual.median)}."
    if high and len(usual) >= MIN_STEPS:
        words += f" {len(high)} of {len(largest)} steps have one above {SPIKE} times the median."
        level = "warning" if len(high) > 1 or most > GREAT_SPIKE * usual.median else "note"
        yield judged(level, "Gradients spike", words, *names, evidence=evidence)
    else:
        yield judged("good", "Gradients do not spike", words, *names, evidence=evidence)


def signal(watched: Watched) -> Iterator[Verdict]:
    """Groups that teach nothing: all advantages 0, or, without a teacher, all grades alike."""
    name = "grade/std_in_group"
    spread = watched.series(name).usual
    if watched.sampled and not watched.taught and len(spread) and not HEALTHY[name].holds(spread.median):
        words = f"The grades of a group differ by {figure(spread.median)} only (standard deviation, {of_usual(spread)}), and "
        words += "credit comes from nothing else."
        evidence = medians(watched, name, "grade/mean")
        yield judged("bad", "All grades of a group are equal", words, name, "grade/mean", evidence=evidence)
    else:
        yield from ranged("advantage/degenerate_groups")(watched)


def dropped(watched: Watched) -> Iterator[Verdict]:
    name = "teacher/dropped_groups"
    lost = watched.series(name)
    if not len(lost):
        return
    count, prompts = sum(lost.values), watched.setting("rollout.prompts_per_step")
    of = f" of {figure(prompts * len(lost))}" if prompts else ""
    words = f"{figure(count)}{of} groups were left out over {span(lost.range)}."
    if not count:
        yield judged("good", "No group was dropped", words, name)
        return
    few = prompts is not None and count <= DROPPED * prompts * len(lost)
    step, most = lost.largest()
    evidence = [Evidence(label="most in one step", value=figure(most), steps=(step, step))]
    yield judged("note" if few else "warning", "Groups were dropped", words, name, evidence=evidence)


def retries(watched: Watched) -> Iterator[Verdict]:
    names = ("teacher/retries", "teacher/requests")
    again, asked = (watched.total(name) for name in names)
    if not watched.has("teacher/requests"):
        return
    words = f"{figure(again)} of {figure(asked)} requests to the teacher's servers were made again."
    if not again:
        yield judged("good", "The teacher's servers answered", words, *names)
    else:
        level = "warning" if again > RETRIED * asked else "note"
        yield judged(level, "The teacher's servers failed at times", words, *names)


def grader(watched: Watched) -> Iterator[Verdict]:
    name = "grade/grader_errors"
    errors = watched.series(name)
    if not len(errors):
        return
    prompts, size = watched.setting("rollout.prompts_per_step"), watched.setting("rollout.group_size")
    of = f" of {figure(prompts * size * len(errors))}" if prompts and size else ""
    words = f"The grader raised on {figure(sum(errors.values))}{of} completions over {span(errors.range)}."
    fine = HEALTHY[name].holds(sum(errors.values))
    yield judged("good" if fine else "warning", "The grader never raised" if fine else "The grader raises", words, name)


def lag(watched: Watched) -> Iterator[Verdict]:
    """0, or with rollout.max_lag the updates of so many steps."""
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
    whole, steps = watched.total("seconds/step"), watched.series("seconds/step")
    seconds = {
        name: watched.total(f"seconds/{name}") for name in ("rollout", "teacher", "update") if watched.has(f"seconds/{name}")
    }
    if not whole > 0 or not seconds:
        return
    slowest = max(seconds, key=lambda name: seconds[name])
    parts = ", ".join(f"{name} {percent(each / whole)}" for name, each in seconds.items())
    words = f"Of {figure(whole)} s in {span(steps.range)}: {parts}."
    evidence = [Evidence(label=f"seconds/{name}", value=f"{figure(each)} s", steps=steps.range) for name, each in seconds.items()]
    one = watched.sampled and seconds[slowest] / whole > ONE_PHASE
    title = "One phase takes nearly all the time" if one else "Where the time goes"
    advice = of_case(HEALTHY["seconds/step"].advice, slowest.capitalize()) if one else None
    yield judged("note" if one else "good", title, words, f"seconds/{slowest}", evidence=evidence, advice=advice)


def throughput(watched: Watched) -> Iterator[Verdict]:
    """Completion tokens per second of the whole step: waiting of one phase for another is in it."""
    tokens, seconds = watched.run.series("tokens/rollout"), watched.run.series("seconds/step")
    both = zip(watched.run.metrics, tokens, seconds, strict=True)
    speeds = {row["step"]: count / time for row, count, time in both if count is not None and time}
    over = change(Series(steps=tuple(speeds), values=tuple(speeds.values())))
    if over is None:
        return
    names = ("tokens/rollout", "seconds/step", "completion/mean_length")
    words = f"Speed of whole steps went {over.words('tokens a second')}."
    evidence = (*over.evidence("tokens per second"), *medians(watched, "completion/mean_length"))
    slower = over.falls(SLOWER)
    title = "The run gets slower" if slower else "The run does not get slower"
    advice = HEALTHY["tokens_per_second/rollout"].advice if slower else None
    yield judged("warning" if slower else "good", title, words, *names, evidence=evidence, advice=advice)


def memory(watched: Watched) -> Iterator[Verdict]:
    name = "memory/peak"
    if (over := watched.change(name)) is not None:
        grows = over.rises(LARGER)
        level, title = ("note", "Memory grows") if grows else ("good", "Memory is steady")
        yield judged(level, title, f"Peak memory went {over.words('GiB')}.", name, evidence=over.evidence(name))


CHECKS = (loss, gradients, signal, dropped, retries, grader, lag, phases, throughput, memory)
