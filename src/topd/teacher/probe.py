"""Prove that teacher, student, tokenizer and task fit, before anything is spent.

Each check says what it looked at, what it found, and what to do about it. `topd probe` prints them; `topd train` runs the same
and stops at a failed one.
"""

from collections.abc import Iterator, Sequence

import torch

from topd.config import Config
from topd.errors import RunStopped
from topd.models.language_model import LanguageModel
from topd.models.logprobs import score_groups
from topd.ops.proximal import proximal_reward
from topd.rollout.engine import Engine, SamplingParams
from topd.teacher.scoring import broken_scores
from topd.teacher.teacher import Check, Teacher, Unscored
from topd.types import Prompt, RolloutGroup

PROBE_PROMPTS, PROBE_ROLLOUTS, PROBE_TOKENS = 2, 2, 16

REWARD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean |reward| of a student that is its own teacher, in nats, by the precision it is sampled in."""


def check_run(
    config: Config,
    *,
    student: LanguageModel,
    engine: Engine,
    teacher: Teacher | None,
    prompts: Sequence[Prompt],
    evaluated: Sequence[Prompt] = (),
) -> Iterator[Check]:
    """Facts about the run: context, temperature, log-probs really returned, and a student that is its own teacher.

    Without a teacher only what concerns the student is looked at. `evaluated` are the prompts of benchmarks.
    """
    room = min(length for length in (student.context_length, engine.context_length) if length is not None)
    with_teacher = min(room, (teacher.context_length if teacher is not None else None) or room)
    yield _check_context("context", "rollout", prompts, config.rollout.max_completion_tokens, with_teacher)
    key = "eval" if config.eval.max_completion_tokens else "rollout"
    limit = config.eval.max_completion_tokens or config.rollout.max_completion_tokens
    if evaluated and engine.kind != "embedded":
        yield _check_context("context of evaluations", key, evaluated, limit, room)
    if teacher is not None:
        yield _check_temperature(config.rollout.temperature, teacher.honours_temperature)
    try:
        engine.load_weights(engine.policy_version)
    except RunStopped as error:
        yield Check(name="rollout servers", ok=False, detail=str(error))
        return
    if engine.kind != "embedded":
        yield Check(name="rollout servers", ok=True, detail=engine.describe())
    params = SamplingParams(
        n=PROBE_ROLLOUTS,
        max_tokens=min(PROBE_TOKENS, config.rollout.max_completion_tokens),
        temperature=config.rollout.temperature,
        seed=(config.run.seed, "probe"),
    )
    groups = engine.generate(probe_prompts(prompts), params)
    if teacher is not None:
        yield _check_scores(teacher, groups)
    yield check_self_teacher(config, student, groups)


def probe_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every domain, at least two in all: every teacher of several is asked something."""
    first = {prompt.domain: prompt for prompt in reversed(prompts)}
    chosen = {prompt.id: prompt for prompt in [*prompts[:PROBE_PROMPTS], *first.values()]}
    return list(chosen.values())


def _check_context(name: str, section: str, prompts: Sequence[Prompt], limit: int, room: int) -> Check:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    detail = f"longest prompt {longest} + {limit} completion tokens, context {room}"
    if longest + limit <= room:
        return Check(name=name, ok=True, detail=detail)
    remedy = f"Lower {section}.max_completion_tokens, or set task.max_prompt_tokens to drop long prompts."
    return Check(name=name, ok=False, detail=f"{detail}: too short by {longest + limit - room}. {remedy}")


def _check_temperature(temperature: float, honoured: bool) -> Check:
    if temperature == 1 or honoured:
        return Check(name="temperature", ok=True, detail=f"rollouts and teacher log-probs are both at {temperature:g}")
    return Check(
        name="temperature",
        ok=False,
        detail=f"rollout.temperature = {temperature:g}, but this teacher returns log-probs at temperature 1: the reward would "
        "compare two different distributions. Set rollout.temperature = 1.",
    )


def _check_scores(teacher: Teacher, groups: Sequence[RolloutGroup]) -> Check:
    name = "teacher log-probs"
    for group, scores in zip(groups, teacher.score(groups), strict=True):
        broken = scores.reason if isinstance(scores, Unscored) else broken_scores(group, scores)
        if broken is not None:
            return Check(name=name, ok=False, detail=broken)
    num_tokens = sum(len(completion) for group in groups for completion in group.completions)
    return Check(name=name, ok=True, detail=f"one for each of {num_tokens} probe tokens")


def check_self_teacher(config: Config, student: LanguageModel, groups: Sequence[RolloutGroup]) -> Check:
    """Sampled log-probs against the trainer's for the same tokens: as its own teacher, the student must earn 0 everywhere."""
    own = score_groups(student, groups, max_tokens=4096, temperature=config.rollout.temperature)
    sampled = torch.cat([rollout.logprobs for group in groups for rollout in group.rollouts])
    log_ratio = torch.cat([part for parts in own for part in parts]) - sampled
    worst = float(proximal_reward(log_ratio, alpha=0.5).abs().mean())
    dtype = torch.float32 if config.student.dtype == config.trainer.dtype == "float32" else torch.bfloat16
    detail = f"mean |reward| {worst:.2g} nats, largest log-prob difference {float(log_ratio.abs().max()):.2g}"
    if worst <= REWARD_TOLERANCE[dtype]:
        return Check(name="student as own teacher", ok=True, detail=detail)
    return Check(
        name="student as own teacher",
        ok=False,
        detail=f"{detail}: sampling and scoring disagree about the same tokens, so every reward would be wrong. Look at dtype, "
        "temperature and the engine (vLLM needs --logprobs-mode processed_logprobs where rollout.temperature is not 1).",
    )
