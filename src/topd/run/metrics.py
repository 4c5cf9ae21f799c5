"""The metrics of a step, computed from its objects; run/catalogue.py declares them.

A metric is taken over the whole step with its true denominator, never over the last micro-batch.
"""

import math
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topd.ops.advantage import segment_mean_std
from topd.ragged import Ragged
from topd.run.catalogue import NAMES, declared_name
from topd.types import Credit, Prompt, ScoredGroup, StepReport


def step_metrics(
    *,
    step: int,
    policy_version: int,
    groups: Sequence[ScoredGroup],
    flat: Ragged,
    credit: Credit,
    reports: StepReport,
    seconds: Mapping[str, float],
    tokens_before: int,
    sampled: bool,
    prompts: Sequence[Prompt] = (),
    counts: Mapping[str, int] | None = None,
    teacher_of: Mapping[str, str] | None = None,
) -> dict[str, float | int | None]:
    """All metrics of one step. What does not apply (`sampled` is False for demonstrations) or is infinite is None.

    `prompts`: of the step, also those whose groups were dropped. `counts`: of a served teacher. `teacher_of`: domain -> name of
    its teacher, where there are several.
    """
    num_tokens = flat.num_tokens
    values: dict[str, float | int | None] = {"step": step, "policy_version": policy_version}
    values |= _grade_metrics(groups, flat)
    values |= _credit_metrics(flat, credit)
    values |= _length_metrics(groups, flat)
    values |= _update_metrics(reports)
    values |= {f"teacher/{name}": value for name, value in (counts or {}).items()}
    values |= _per_teacher(groups, flat, credit, teacher_of or {})
    values |= _dropped(prompts, groups, teacher_of or {})
    if sampled:
        values |= _policy_metrics(groups, flat, reports) | _ratio_metrics(reports)
        values["policy/lag"] = policy_version - len(reports) - min(scored.group.policy_version for scored in groups)
    values |= {"tokens/rollout": num_tokens, "tokens/total": tokens_before + num_tokens}
    values |= {f"seconds/{name}": round(value, 4) for name, value in seconds.items()}
    trained = sum(report.num_tokens for report in reports)
    for phase, tokens in (("rollout", num_tokens), ("teacher", num_tokens), ("update", trained)):
        values[f"tokens_per_second/{phase}"] = round(tokens / seconds[phase], 1) if seconds.get(phase) else None
    values["memory/peak"] = round(peak_memory_gib(), 3)
    undeclared = {name for name in values if declared_name(name) not in NAMES}
    assert not undeclared, f"undeclared metrics: {undeclared}"
    return {name: _finite(value) for name, value in values.items()}


def _dropped(prompts: Sequence[Prompt], groups: Sequence[ScoredGroup], teacher_of: Mapping[str, str]) -> dict[str, int]:
    """Number of the step's prompts without a group, in total and by teacher."""
    there = {scored.group.prompt.id for scored in groups}
    lost = [prompt for prompt in prompts if prompt.id not in there]
    names = Counter(teacher_of[prompt.domain] for prompt in lost if prompt.domain in teacher_of)
    asked = {teacher_of[prompt.domain] for prompt in prompts if prompt.domain in teacher_of}
    return {"teacher/dropped_groups": len(lost)} | {f"teacher/{name}/dropped_groups": names[name] for name in asked}


def _per_teacher(
    groups: Sequence[ScoredGroup], flat: Ragged, credit: Credit, teacher_of: Mapping[str, str]
) -> dict[str, float | int]:
    """Gap, reward and number of groups of every teacher that was asked in this step."""
    if not teacher_of or "teacher_logprobs" not in flat:
        return {}
    names = [teacher_of[scored.group.prompt.domain] for scored in groups]
    tokens = flat.tokens_per_group.tolist()
    gaps = (flat["behaviour_logprobs"] - flat["teacher_logprobs"]).double().split(tokens)
    rewards = credit.token_rewards.double().split(tokens)
    values: dict[str, float | int] = {}
    for name in sorted(set(names)):
        own = [i for i, each in enumerate(names) if each == name]
        values[f"teacher/{name}/gap"] = float(torch.cat([gaps[i] for i in own]).mean())
        values[f"teacher/{name}/token_reward"] = float(torch.cat([rewards[i] for i in own]).mean())
        values[f"teacher/{name}/groups"] = len(own)
    return values


def _grade_metrics(groups: Sequence[ScoredGroup], flat: Ragged) -> dict[str, Any]:
    _, std = segment_mean_std(flat["grades"], flat.group_sizes)
    return {
        "grade/mean": float(flat["grades"].double().mean()),
        "grade/std_in_group": float(std.mean()),
        "grade/grader_errors": sum(scored.num_grader_errors for scored in groups),
    }


def _credit_metrics(flat: Ragged, credit: Credit) -> dict[str, Any]:
    counts = flat.tokens_per_group
    _, std = segment_mean_std(credit.token_rewards, counts)
    largest = torch.stack([part.abs().max() for part in credit.advantages.split(counts.tolist())])
    values = {
        "token_reward/mean": float(credit.token_rewards.double().mean()),
        "token_reward/std_in_group": float(std.mean()),
        "advantage/degenerate_groups": float((largest == 0).double().mean()),
    }
    if "teacher_logprobs" in flat:
        log_ratio = flat["teacher_logprobs"] - flat["behaviour_logprobs"]
        values["teacher/gap"] = float(-log_ratio.double().mean())
        values["token_reward/floor_share"] = float((log_ratio <= math.log(0.1)).double().mean())
        values |= _percentiles("teacher/log_ratio", log_ratio)
    return values


def _length_metrics(groups: Sequence[ScoredGroup], flat: Ragged) -> dict[str, Any]:
    rollouts = [rollout for scored in groups for rollout in scored.group.rollouts]
    return {
        "completion/mean_length": float(flat.lengths.double().mean()),
        "completion/max_length": int(flat.lengths.max()),
        "completion/truncation_rate": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def _policy_metrics(groups: Sequence[ScoredGroup], flat: Ragged, reports: StepReport) -> dict[str, Any]:
    """The mismatch is that of recomputed log-probs or, where the sampled ones were taken over, of the first mini-batch."""
    sampled = torch.cat([rollout.logprobs for scored in groups for rollout in scored.group.rollouts]).double()
    change = flat["old_logprobs"].double() - sampled
    if not change.any():
        change = reports[0].log_importance.double()
    return {
        "policy/entropy": float(-sampled.mean()),
        "policy/mismatch_kl": float((torch.expm1(change) - change).mean()),
    }


def _update_metrics(reports: StepReport) -> dict[str, Any]:
    norms = [report.grad_norm for report in reports]
    return {
        "train/loss": sum(report.loss for report in reports) / len(reports),
        "train/grad_norm": sum(norms) / len(norms),
        "train/grad_norm_max": max(norms),
        "train/learning_rate": reports[-1].learning_rate,
        "train/updates": len(reports),
    }


def _ratio_metrics(reports: StepReport) -> dict[str, Any]:
    ratio = torch.exp(torch.cat([report.log_importance for report in reports]))
    return {
        "ratio/clip_share": float(torch.cat([r.clipped for r in reports]).double().mean()),
        **_percentiles("ratio", ratio, separator="/"),
    }


def _percentiles(name: str, values: Tensor, separator: str = "_") -> dict[str, float]:
    """Nearest-rank 1st, 50th and 99th percentile."""
    ordered = values.sort().values
    picks = {p: ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] for p in (1, 50, 99)}
    return {f"{name}{separator}p{p:02d}": float(value) for p, value in picks.items()}


def peak_memory_gib() -> float:
    """Peak memory so far: of the accelerator if one is used, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
