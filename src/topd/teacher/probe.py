"""Prove that teacher, student, tokenizer and task fit, before anything is spent.

Each check says what it looked at, what it found, and what to do about it. `topd probe` prints them; `topd train` runs the same
and stops at a failed one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from topd.config import Config
from topd.models.language_model import LanguageModel
from topd.models.logprobs import score_groups
from topd.ops.proximal import proximal_reward
from topd.rollout.engine import Engine, SamplingParams
from topd.teacher.teacher import Teacher
from topd.types import Prompt, RolloutGroup

PROBE_PROMPTS, PROBE_ROLLOUTS, PROBE_TOKENS = 2, 2, 16

REWARD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean |reward| of a student that is its own teacher, in nats, by the precision it is sampled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict."""

    name: str
    ok: bool
    detail: str


def check_vocabulary(student: LanguageModel, teacher: LanguageModel) -> Check:
    """Same tokens with the same ids on both sides; unequal padding of the embedding is allowed."""
    name, mine, theirs = "vocabulary", student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    differing = [token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token)]
    if differing:
        some = ", ".join(repr(token) for token in sorted(differing)[:3])
        return Check(
            name=name,
            ok=False,
            detail=f"student has {len(mine)} tokens, teacher {len(theirs)}; {len(differing)} have no or another id on the other "
            f"side ({some}). The teacher would score other words than were sampled. Use two models with one tokenizer.",
        )
    rows = [model.module.get_input_embeddings().weight.shape[0] for model in (student, teacher)]
    for who, count in zip(("student", "teacher"), rows, strict=True):
        if count <= max(mine.values()):
            detail = (
                f"{who} has {count} embedding rows for token ids up to {max(mine.values())}: the tokenizer is another model's."
            )
            return Check(name=name, ok=False, detail=detail)
    padded = "" if rows[0] == rows[1] else f"; embedding rows differ ({rows[0]} and {rows[1]}): padding, never sampled"
    return Check(name=name, ok=True, detail=f"{len(mine)} tokens, same ids{padded}")


def end_token_map(student: LanguageModel, teacher: LanguageModel) -> dict[int, int]:
    """Every end token of the student -> the one the teacher ends with; those that both end with stay."""
    first = teacher.eos_token_ids[0]
    same_first = student.eos_token_ids[0] == first
    return {token: token if same_first and token in teacher.eos_token_ids else first for token in student.eos_token_ids}


def check_end_tokens(student: LanguageModel, teacher: LanguageModel, map_eos: bool) -> Check:
    """Student and teacher must end completions alike, or `map_eos` must say that one is scored as the other."""
    changed = {mine: theirs for mine, theirs in end_token_map(student, teacher).items() if mine != theirs}
    word = student.tokenizer.convert_ids_to_tokens
    if not changed:
        ends = ", ".join(f"{word(token)!r} ({token})" for token in student.eos_token_ids)
        return Check(name="end token", ok=True, detail=f"both end with {ends}")
    pairs = ", ".join(
        f"{word(mine)!r} ({mine}), the teacher with {word(theirs)!r} ({theirs})" for mine, theirs in changed.items()
    )
    if map_eos:
        return Check(
            name="end token", ok=True, detail=f"the student ends with {pairs}; scored as the teacher's (teacher.map_eos)"
        )
    return Check(
        name="end token",
        ok=False,
        detail=f"the student ends with {pairs}. The teacher would punish stopping, and completions would grow without end. Set "
        "teacher.map_eos = true to score one as the other, or fine-tune the student first.",
    )


def check_run(
    config: Config,
    *,
    student: LanguageModel,
    engine: Engine,
    teacher: Teacher | None,
    teacher_context: int | None,
    prompts: Sequence[Prompt],
) -> Iterator[Check]:
    """Facts about the run: context, temperature, log-probs really returned, and a student that is its own teacher.

    Without a teacher only what concerns the student is looked at.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    contexts = [student.context_length] + ([] if teacher_context is None else [teacher_context])
    yield _check_context(config, longest, min(contexts))
    if teacher is not None:
        yield _check_temperature(config.rollout.temperature, teacher.honours_temperature)
    params = SamplingParams(
        n=PROBE_ROLLOUTS,
        max_tokens=min(PROBE_TOKENS, config.rollout.max_completion_tokens),
        temperature=config.rollout.temperature,
        seed=(config.run.seed, "probe"),
    )
    groups = engine.generate(list(prompts[:PROBE_PROMPTS]), params)
    if teacher is not None:
        yield _check_scores(teacher, groups)
    yield check_self_teacher(config, student, groups)


def _check_context(config: Config, longest: int, room: int) -> Check:
    needed = longest + config.rollout.max_completion_tokens
    detail = f"longest prompt {longest} + {config.rollout.max_completion_tokens} completion tokens, context {room}"
    if needed <= room:
        return Check(name="context", ok=True, detail=detail)
    remedy = "Lower rollout.max_completion_tokens, or set task.max_prompt_tokens to drop long prompts."
    return Check(name="context", ok=False, detail=f"{detail}: too short by {needed - room}. {remedy}")


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
        for completion, logprobs in zip(group.completions, scores, strict=True):
            if len(logprobs) != len(completion):
                return Check(name=name, ok=False, detail=f"{len(logprobs)} numbers for {len(completion)} tokens.")
            if bool(logprobs.isnan().any()) or float(logprobs.max()) > 1e-4:
                return Check(name=name, ok=False, detail="NaN or above 0: the teacher's weights or server are broken.")
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
        "temperature and the engine.",
    )
