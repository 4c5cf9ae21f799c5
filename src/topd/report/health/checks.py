"""Health of a run in words, with the evidence: verdicts(run, steps), worst first.

Each check is a function Watched -> verdicts, in the table at the end. Those on what was learned are in learning.py, those
on how the work went in service.py; the rules of usual values and changes in verdict.py, the ranges in run/healthy.py. What
does not apply to a run is left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from topd.report.credit import TOP_SHARE, floor_of, top_sum
from topd.report.health import learning, service
from topd.report.health.learning import AGREED, CHANGE
from topd.report.health.verdict import (
    LEVELS,
    MIN_STEPS,
    Evidence,
    Verdict,
    Watched,
    figure,
    judged,
    medians,
    of_usual,
    percent,
    ranged,
    span,
)
from topd.report.stored import StoredRun, number
from topd.report.stored_step import Numbers, StoredStep
from topd.run.catalogue import NAMES, VOLATILE, declared_name
from topd.run.healthy import HEALTHY, of_case

REJECTED = math.log(0.1)
"""A token at a tenth of the student's probability, as in token_reward/floor_share."""

PUNISHED = 0.5
"""Share of end tokens that the teacher must reject for a pattern; the other tokens must be rejected half as often."""

WELCOMED = 1.0
"""Nats. A median log-ratio of end tokens above it: the teacher would have stopped earlier."""

MIN_ENDS = 20
"""Fewer end tokens show no pattern."""

CONCENTRATED = 0.4
RULED = 0.6
"""Shares of all |advantage| that the top 1 % of tokens hold. In runs that learn: 0.08 to 0.22 with a floor, to 0.48 without."""

STILL = 1e-3
"""Ratios no further from 1 are those of a policy that does not move."""


def verdicts(run: StoredRun, steps: Sequence[StoredStep] = ()) -> list[Verdict]:
    """All that can be said, worst first. `steps`: stored rollouts to look into; without them their checks are left out."""
    watched = Watched(run=run, rollouts=steps)
    with np.errstate(all="ignore"):
        judgements = list(chain.from_iterable(check(watched) for check in CHECKS))
    own = run.credit.advice if run.credit else {}
    judgements = [
        replace(verdict, advice=f"{verdict.advice} {own[verdict.metrics[0]]}")
        if verdict.advice and verdict.metrics and verdict.metrics[0] in own
        else verdict
        for verdict in judgements
    ]
    return sorted(judgements, key=lambda verdict: LEVELS.index(verdict.level))


def state(watched: Watched) -> Iterator[Verdict]:
    run = watched.run
    done, planned = len(run.metrics), run.planned_steps
    if done < MIN_STEPS:
        words = f"{done} recorded; from {MIN_STEPS} steps on something can be said about changes."
        yield judged("note", "Too few steps to judge", words)
    if run.problems:
        words = f"What could not be read was left out: {run.problems[0]}" + (", and more." if len(run.problems) > 1 else ".")
        evidence = [Evidence(label="noted", value=problem) for problem in run.problems]
        yield judged("warning", "Parts of the run folder are missing or damaged", words, evidence=evidence)
    of = f" of {planned}" if planned is not None else ""
    if run.finished:
        yield judged("good", "The run is finished", f"{done}{of} steps are recorded, and its summary is there.")
    else:
        words = f"{done}{of} steps are recorded: it is still going on, or it was stopped."
        yield judged("note", "The run is not finished", words, advice="If it was stopped, go on with run.resume = true.")


def probed(watched: Watched) -> Iterator[Verdict]:
    """Warnings of the probe."""
    for check in watched.run.checks:
        if check.warning:
            yield judged("warning", f"The probe warned: {check.name}", check.detail)


def infinite(watched: Watched) -> Iterator[Verdict]:
    """A gap of null where it was computed: some sampled token has probability 0 to the teacher."""
    name = "teacher/gap"
    at = [row.get("step") for row in watched.run.metrics if name in row and row[name] is None]
    if at:
        words = f"In {len(at)} of {len(watched.run.metrics)} steps, first in step {at[0]}, the teacher gave a sampled token "
        words += "probability 0, so the gap is infinite there."
        if watched.run.credit is not None and floor_of(watched.run) is None:
            yield judged("bad", "The gap is infinite in some steps", words, name, advice=of_case(HEALTHY[name].advice, "Null"))
        else:
            words += " The reward has a floor, so credit stays finite." if watched.run.credit else ""
            yield judged("note", "The gap is infinite in some steps", words, name, advice="")


def missing(watched: Watched) -> Iterator[Verdict]:
    """Metrics that are there and no finite number. Null times and speeds are harmless; a null gap has its own check."""
    holes: dict[str, list[int]] = {}
    for i, row in enumerate(watched.run.metrics, 1):
        for name, value in row.items():
            harmless = value is None and (name in VOLATILE or name == "teacher/gap")
            if declared_name(name) in NAMES and number(value) is None and not harmless:
                holes.setdefault(name, []).append(i)
    if holes:
        named = ", ".join(f"{name} ({len(at)} of {len(watched.run.metrics)} steps)" for name, at in sorted(holes.items())[:4])
        words = f"Not a finite number: {named}{', ...' if len(holes) > 4 else ''}. They were left out."
        level = "bad" if any(name.startswith("train/") for name in holes) else "note"
        advice = "Look at the rollouts of these steps, and at what the run printed."
        yield judged(level, "Some metrics are not numbers", words, *sorted(holes), advice=advice)


def end_tokens(watched: Watched) -> Iterator[Verdict]:
    """End tokens (the last of a completion that stopped by itself) against all other tokens: the base/instruct trap."""
    ends, others = _split(watched, "log_ratio")
    if not len(ends) + len(others):
        return
    where = _where(watched)
    stopped, title = f"{len(ends)} completions that ended by themselves in {where}", "The teacher on the end token"
    if len(ends) < MIN_ENDS:
        yield judged("note", title, f"There are only {stopped}: too few for a pattern (at least {MIN_ENDS}).")
        return
    rejected, rejected_others = _mean((ends <= REJECTED).astype(np.float32)), _mean((others <= REJECTED).astype(np.float32))
    words = f"Of {stopped} the teacher gave {percent(rejected)} of the end tokens at most a tenth of the student's probability; "
    words += f"of the {len(others):,} other tokens {percent(rejected_others)}."
    middle = figure(float(np.median(ends)))
    evidence = [Evidence(label="median log-ratio of end tokens", value=middle)]
    for what, parts in (("log-ratio", (ends, others)), ("advantage", _split(watched, "advantage"))):
        means = {name: _mean(part) for name, part in zip(("end", "other"), parts, strict=True) if len(part)}
        evidence += [Evidence(label=f"mean {what} of {name} tokens", value=figure(mean)) for name, mean in means.items()]
    if rejected >= PUNISHED and rejected_others < rejected / 2:
        advice = of_case(HEALTHY["completion/mean_length"].advice, "Growing")
        yield judged("bad", "The teacher punishes the end token", words, evidence=evidence, advice=advice)
    elif np.median(ends) >= WELCOMED:
        words = f"Over {stopped} the median log-ratio of the end token is {middle} nats: the teacher would have stopped there "
        words += "more often, so completions will get shorter."
        yield judged("note", "The teacher wants earlier ends", words, evidence=evidence)
    else:
        yield judged("good", "The teacher accepts the end token", words, evidence=evidence)


def _mean(values: Numbers) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def _split(watched: Watched, stream: str) -> tuple[Numbers, Numbers]:
    """A stream of all stored rollouts: end tokens, other tokens. Not a number is left out, minus infinity kept."""
    ends, others = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for rollout in (rollout for step in watched.rollouts for rollout in step.rollouts):
        values = rollout.streams.get(stream)
        if values is not None and len(values):
            cut = len(values) - (rollout.finish_reason == "stop")
            others.append(values[:cut])
            ends.append(values[cut:])
    first, second = np.concatenate(ends), np.concatenate(others)
    return first[~np.isnan(first)], second[~np.isnan(second)]


def _where(watched: Watched) -> str:
    numbers = [step.step for step in watched.rollouts]
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{'step' if len(numbers) == 1 else 'steps'} {listed}"


def concentration(watched: Watched) -> Iterator[Verdict]:
    if not watched.sampled:
        return
    size = np.abs(np.concatenate(_split(watched, "advantage")).astype(np.float64))
    size = size[np.isfinite(size)]
    count, held = top_sum(size)
    if not held > 0:
        return
    share = float(held / size.sum())
    words = f"The {count:,} tokens ({percent(TOP_SHARE)} of {len(size):,} in {_where(watched)}) with the largest advantages hold "
    words += f"{percent(share)} of all credit."
    evidence = [Evidence(label="largest |advantage|", value=figure(float(size.max())))]
    advice = "Read them in the token view. A reward with a floor or a larger rollout.group_size spreads credit."
    level, title = "good", "Credit is spread over the tokens"
    if share > CONCENTRATED:
        level, title = ("warning", "A few tokens rule the update") if share > RULED else ("note", "Credit is concentrated")
    yield judged(level, title, words, evidence=evidence, advice=advice if level != "good" else "")


def tail(watched: Watched) -> Iterator[Verdict]:
    """The heavy tail is harmless above a floor, and dangerous where the reward is the log-ratio itself."""
    name = "teacher/log_ratio_p01"
    usual, top = watched.series(name).usual, watched.usual("teacher/log_ratio_p99")
    if not len(usual):
        return
    floor = floor_of(watched.run)
    words = f"One token in a hundred has a log-ratio below {figure(usual.median)} nats ({of_usual(usual)})."
    evidence = tuple(medians(watched, name, "teacher/log_ratio_p50", "teacher/log_ratio_p99"))
    if floor is not None:
        words += f" The reward never falls below {figure(floor[0])}, {floor[1]}, however far a log-ratio does."
        yield judged("good", "The heavy tail is bounded", words, name, evidence=evidence)
    elif HEALTHY[name].holds(usual.median):
        yield judged("good", "The tail is not heavy", words, name, evidence=evidence)
    elif _is_log_ratio(watched):
        words += " The reward is the log-ratio itself, without a floor, so a few such tokens can make an update."
        yield judged("warning", "The heavy tail is not bounded", words, name, evidence=evidence)
    else:
        yield judged("note", "The tail is heavy", words, name, evidence=evidence)
    if top is not None and not HEALTHY["teacher/log_ratio_p99"].holds(top):
        words = f"One token in a hundred has a log-ratio above {figure(top)} nats ({of_usual(usual)})."
        yield judged("note", "Some tokens are pulled up hard", words, "teacher/log_ratio_p99")


def _is_log_ratio(watched: Watched) -> bool:
    """The mean reward is minus the gap in every step: told by the numbers, whatever the algorithm is called."""
    pairs = zip(watched.run.series("token_reward/mean"), watched.run.series("teacher/gap"), strict=True)
    both = [(reward, gap) for reward, gap in pairs if reward is not None and gap is not None]
    return bool(both) and all(math.isclose(reward, -gap, rel_tol=1e-3, abs_tol=1e-6) for reward, gap in both)


def movement(watched: Watched) -> Iterator[Verdict]:
    """Distance that the updates of a step move the policy. With one update a step the ratio is 1 and says nothing."""
    updates, clip = watched.usual("train/updates"), watched.series("ratio/clip_share")
    low, high = watched.series("ratio/p01"), watched.series("ratio/p99")
    if not (updates is not None and updates > 1 and len(clip) and len(low) and len(high)):
        return
    names = ("ratio/clip_share", "ratio/p01", "ratio/p99")
    words = f"In the median step of {span(clip.range)}, {percent(clip.median)} of the tokens are clipped, and 98 % of the "
    words += f"importance ratios lie in {figure(low.median)} to {figure(high.median)} ({figure(updates)} updates a step)."
    whole = [
        Evidence(label=f"median {name}", value=figure(x.median), steps=x.range)
        for name, x in zip(names, (clip, low, high), strict=True)
    ]
    evidence = (*whole, *medians(watched, *names, "train/grad_norm", "train/learning_rate"))
    gap, over = watched.usual("teacher/gap"), watched.change("teacher/gap")
    still = abs(low.usual.median - 1) <= STILL and abs(high.usual.median - 1) <= STILL and not clip.usual.median
    out = [name for name, x in zip(names, (clip, low, high), strict=True) if not HEALTHY[name].holds(x.median)]
    if out:
        words += f" {HEALTHY[out[0]].outside}"
        advice = HEALTHY["ratio/clip_share"].advice
        yield judged("warning", "The policy moves too fast", words, *names, evidence=evidence, advice=advice)
    elif still and over is not None and gap is not None and gap > AGREED and not over.falls(CHANGE):
        norm, rate = watched.usual("train/grad_norm"), watched.usual("train/learning_rate")
        numb = norm is not None and not HEALTHY["train/grad_norm"].holds(norm)
        words = f"In {span(low.usual.range)} no importance ratio is further than {STILL:g} from 1 (1st and 99th percentile) and "
        words += f"none is clipped, while the gap stays at {figure(gap)} nats per token."
        words += f" The learning rate is {figure(rate)}." if rate is not None else ""
        advice = HEALTHY["train/grad_norm"].advice if numb else "Raise trainer.learning_rate; check trainer.schedule."
        yield judged("warning", "The policy has stopped moving", words, *names, evidence=evidence, advice=advice)
    else:
        yield judged("good", "The policy moves at a measured pace", words, *names, evidence=evidence)


CHECKS = (
    *(state, probed, infinite, missing),
    *learning.CHECKS,
    *(end_tokens, concentration, ranged("token_reward/floor_share"), tail, movement, ranged("policy/mismatch_kl")),
    *service.CHECKS,
)
