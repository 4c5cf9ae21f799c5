"""Checks that teacher, student, tokenizer and task fit, before any training: a measurement each and, if it fails, a remedy."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from topd.config import Config
from topd.errors import RunStopped
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.models.logprobs import score_groups
from topd.models.policy import frozen_copy
from topd.ops.proximal import proximal_reward
from topd.rollout.engine import Engine, SamplingParams
from topd.teacher.local import DEFAULT, LocalTeacher
from topd.teacher.probe_numbers import check_numbers
from topd.teacher.probe_weights import check_weights
from topd.teacher.routed import RoutedTeacher
from topd.teacher.served import EndpointTeacher
from topd.teacher.teacher import Check, OneTeacher, Teacher, Unscored, broken_scores
from topd.types import Prompt, RolloutGroup

PROBE_PROMPTS, PROBE_ROLLOUTS, PROBE_TOKENS = 2, 2, 16

NOISE_TOKENS = 64
"""Tokens per completion in low precision, where whole groups are sampled to measure their noise."""

REWARD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean |reward| of a student that is its own teacher, in nats, by sampling precision."""


def check_run(
    config: Config,
    *,
    student: LanguageModel,
    engine: Engine,
    teacher: OneTeacher | RoutedTeacher | None,
    wanted: Wanted = DEFAULT,
    prompts: Sequence[Prompt],
    evaluated: Sequence[Prompt] = (),
) -> Iterator[Check]:
    """Check context, temperature, the teacher's log-probs (if there is one), and the student as its own teacher."""
    room = min(length for length in (student.context_length, engine.context_length) if length is not None)
    with_teacher = min(room, (teacher.context_length if teacher is not None else None) or room)
    notes = (student.context_note, teacher.context_note if teacher is not None else "")
    note = " ".join(dict.fromkeys(filter(None, notes)))
    yield _check_context("context", "rollout", prompts, config.rollout.max_completion_tokens, with_teacher, note)
    key = "eval" if config.eval.max_completion_tokens else "rollout"
    limit = config.eval.max_completion_tokens or config.rollout.max_completion_tokens
    if evaluated and engine.kind != "embedded":
        yield _check_context("context of evaluations", key, evaluated, limit, room)
    if teacher is not None:
        yield (evidence := _check_evidence(teacher, wanted))
        if not evidence.ok:
            return
        yield _check_temperature(config.rollout.temperature, teacher.honours_temperature)
    try:
        engine.load_weights(engine.policy_version)
    except RunStopped as error:
        yield Check(name="rollout servers", ok=False, detail=str(error))
        return
    if engine.kind != "embedded":
        yield Check(name="rollout servers", ok=True, detail=engine.describe())
    noisy = teacher is not None and config.reward_dtype != "float32"
    params = SamplingParams(
        n=config.rollout.group_size if noisy else PROBE_ROLLOUTS,
        max_tokens=min(NOISE_TOKENS if noisy else PROBE_TOKENS, config.rollout.max_completion_tokens),
        temperature=config.rollout.temperature,
        seed=(config.run.seed, "probe"),
    )
    groups = engine.generate(probe_prompts(prompts), params)
    if teacher is not None:
        yield _check_scores(teacher, groups, wanted)
        yield from _check_numbers(teacher, student, groups)
    yield check_self_teacher(config, student, groups, asked=teacher is not None)


def probe_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every domain, at least two in total, so that every teacher is queried."""
    first = {prompt.domain: prompt for prompt in reversed(prompts)}
    chosen = {prompt.id: prompt for prompt in [*prompts[:PROBE_PROMPTS], *first.values()]}
    return list(chosen.values())


def _check_context(name: str, section: str, prompts: Sequence[Prompt], limit: int, room: int, note: str = "") -> Check:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    detail = f"longest prompt {longest} + {limit} completion tokens, context {room}"
    if longest + limit <= room:
        return Check(name=name, ok=True, detail=detail)
    remedy = f"Lower {section}.max_completion_tokens, or set task.max_prompt_tokens to drop long prompts."
    return Check(name=name, ok=False, detail=f"{detail}: too short by {longest + limit - room}. {remedy} {note}".rstrip())


def _check_temperature(temperature: float, honoured: bool) -> Check:
    if temperature == 1 or honoured:
        return Check(name="temperature", ok=True, detail=f"rollouts and teacher log-probs are both at {temperature:g}")
    return Check(
        name="temperature",
        ok=False,
        detail=f"rollout.temperature = {temperature:g}, but this teacher returns log-probs at temperature 1: the reward would "
        "compare two different distributions. Set rollout.temperature = 1.",
    )


def _check_evidence(teacher: Teacher, wanted: Wanted) -> Check:
    """Check that the teacher gives all streams that the algorithm needs."""
    lacking = ", ".join(sorted(wanted.streams - teacher.gives))
    detail = f"the teacher gives {', '.join(sorted(wanted.streams & teacher.gives))}"
    if lacking:
        detail = f"the algorithm needs {lacking}, which this teacher does not give. Load the teacher here (without base_url)."
    return Check(name="evidence", ok=not lacking, detail=detail)


def _check_scores(teacher: Teacher, groups: Sequence[RolloutGroup], wanted: Wanted) -> Check:
    name = "teacher log-probs"
    for group, scores in zip(groups, teacher.score(groups, wanted), strict=True):
        broken = scores.reason if isinstance(scores, Unscored) else broken_scores(group, scores)
        if broken is not None:
            return Check(name=name, ok=False, detail=broken)
    num_tokens = sum(len(completion) for group in groups for completion in group.completions)
    return Check(name=name, ok=True, detail=f"one for each of {num_tokens} probe tokens")


def _check_numbers(
    teacher: OneTeacher | RoutedTeacher, student: LanguageModel, groups: Sequence[RolloutGroup]
) -> Iterator[Check]:
    """Check the numbers of every teacher, then reset its counters: the probe's requests do not belong to the first step."""
    teachers = teacher.teachers if isinstance(teacher, RoutedTeacher) else {"": teacher}
    for name, each in teachers.items():
        checks = list(check_numbers(each, student, groups))
        if isinstance(each, EndpointTeacher):
            checks.append(check_weights(each, student, groups))
        yield from (dataclasses.replace(check, name=f"{check.name} ({name})" if name else check.name) for check in checks)
    teacher.counts()


def check_self_teacher(config: Config, student: LanguageModel, groups: Sequence[RolloutGroup], *, asked: bool = True) -> Check:
    """The student in the teacher's place must earn 0 for its own samples or, in low precision, no more than rounding.

    In low precision the teacher is a frozen copy in the teacher's dtype. `asked`: credit uses a teacher.
    """
    name = "student as own teacher"
    own = score_groups(student, groups, max_tokens=4096, temperature=config.rollout.temperature)
    sampled = torch.cat([rollout.logprobs for group in groups for rollout in group.rollouts])
    mismatch = torch.cat([part for parts in own for part in parts]) - sampled
    worst = float(proximal_reward(mismatch, alpha=0.5).abs().mean())
    dtype = torch.float32 if config.student.dtype == config.trainer.dtype == "float32" else torch.bfloat16
    detail = f"mean |reward| {worst:.2g} nats, largest log-prob difference {float(mismatch.abs().max()):.2g}"
    if worst > REWARD_TOLERANCE[dtype]:
        detail += (
            ": sampling and scoring disagree about the same tokens, so every reward would be wrong. Check dtype, temperature "
            "and the engine (vLLM needs --logprobs-mode processed_logprobs where rollout.temperature is not 1)."
        )
        return Check(name=name, ok=False, detail=detail)
    if not asked:
        return Check(name=name, ok=True, detail=detail)
    if config.served_teachers():
        detail += ". Servers do not report their precision; it is assumed to be the teacher's dtype"
    if config.reward_dtype == "float32":
        return Check(name=name, ok=True, detail=detail)
    noise, largest = own_noise(config, student, groups, own)
    harmful, words = config.algorithm.judge_noise(largest)
    return Check(name=name, ok=True, warning=harmful, detail=f"{detail}. {noise}{words}")


def own_noise(
    config: Config, student: LanguageModel, groups: Sequence[RolloutGroup], own: Sequence[tuple[Tensor, ...]]
) -> tuple[str, float]:
    """Noise of low precision in the groups: a sentence, and the largest root mean square of a group's log-ratios (nats).

    `own`: the trainer's log-probs. The teacher is a frozen copy of the student in the teachers' lowest dtype.
    """
    low = any(teacher.dtype == "bfloat16" for teacher in config.teachers_by_name().values())
    copy = frozen_copy(student, torch.bfloat16) if low else dataclasses.replace(student, autocast_dtype=None)
    scores = LocalTeacher(copy, temperature=config.rollout.temperature, max_tokens=4096).score(groups)
    parts, spreads = [], []
    for mine, theirs in zip(own, scores, strict=True):
        assert not isinstance(theirs, Unscored), "a local teacher scores all"
        log_ratio = theirs["teacher_logprobs"] - torch.cat(mine)
        parts.append(log_ratio.abs())
        spreads.append(float(log_ratio.square().mean().sqrt()))
    size = torch.cat(parts)
    sentence = (
        f"In the precision of teacher and trainer (bfloat16) the student differs from itself by {float(size.mean()):.2g} nats a "
        f"token (99 % within {float(size.quantile(0.99)):.2g}), root mean square up to {max(spreads):.2g} in a group"
    )
    return sentence, max(spreads)
