"""Every metric of metrics.jsonl, declared in one table, and the function that computes them from a step's objects.

A metric is taken over the whole step with its true denominator, never over the last micro-batch. docs/metrics.md is generated
from the table. Names of volatile metrics (times, throughput, memory) differ between two runs of the same configuration.
"""

import math
import re
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from topd.ops.advantage import segment_mean_std
from topd.ops.weighting import tokens_per_group
from topd.types import Credit, CreditInput, Prompt, ScoredGroup, StepReport


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    unit: str
    meaning: str
    volatile: bool = False


METRICS = (
    Metric("step", "count", "Rollout batches done."),
    Metric("policy_version", "count", "Optimizer updates done, after this step."),
    Metric("reward/mean", "score in [0, 1]", "Mean grade of the completions."),
    Metric("reward/std_in_group", "score", "Mean over groups of the standard deviation of grades in a group."),
    Metric("reward/grader_errors", "completions", "Completions on which the grader raised; they get reward 0."),
    Metric("token_reward/mean", "nats", "Mean per-token reward that credit is made of."),
    Metric(
        "token_reward/floor_share",
        "share",
        "Tokens that the teacher gives at most a tenth of the student's probability: at or near the floor log(1 - alpha).",
    ),
    Metric(
        "teacher/gap",
        "nats per token",
        "Reverse KL(student || teacher) per token: mean of behaviour minus teacher log-prob over sampled tokens. What "
        "distillation brings down. Null if the teacher gives a sampled token probability 0.",
    ),
    Metric("teacher/log_ratio_p01", "nats", "1st percentile of teacher minus behaviour log-prob: the heavy tail."),
    Metric("teacher/log_ratio_p50", "nats", "Median of it."),
    Metric("teacher/log_ratio_p99", "nats", "99th percentile of it."),
    Metric(
        "teacher/dropped_groups",
        "groups",
        "Groups of the step that were left out: the teacher could not score them, or other weights sampled them.",
    ),
    Metric("teacher/requests", "requests", "Requests to a served teacher's servers since the step before.", volatile=True),
    Metric("teacher/retries", "requests", "Requests that failed and were made again.", volatile=True),
    Metric("teacher/cached", "completions", "Completions whose scores were still on disk, after a resume.", volatile=True),
    Metric("teacher/NAME/gap", "nats per token", "teacher/gap over the prompts of [teachers.NAME], where there are several."),
    Metric("teacher/NAME/reward", "nats", "token_reward/mean over them."),
    Metric("teacher/NAME/groups", "groups", "How many groups they were."),
    Metric("teacher/NAME/dropped_groups", "groups", "teacher/dropped_groups among them."),
    Metric("token_reward/std_in_group", "nats", "Mean over groups of the standard deviation of per-token rewards in a group."),
    Metric("advantage/degenerate_groups", "share", "Groups without any signal: all advantages are 0."),
    Metric("ratio/p01", "ratio", "1st percentile of the importance ratio over all tokens and updates of the step."),
    Metric("ratio/p50", "ratio", "Median of it."),
    Metric("ratio/p99", "ratio", "99th percentile of it."),
    Metric("ratio/clip_share", "share", "Tokens without gradient because the ratio was clipped."),
    Metric(
        "policy/entropy",
        "nats per token",
        "Entropy of the policy, estimated as minus the mean sampled log-prob. Falling to 0 means collapse.",
    ),
    Metric(
        "policy/mismatch_kl",
        "nats per token",
        "KL of the engine's distribution to the trainer's before the first update (k3 estimate). Healthy: below 0.01.",
    ),
    Metric("policy/lag", "updates", "Updates between the weights that sampled and those that the step began with."),
    Metric("completion/mean_length", "tokens", "Mean completion length, end token included."),
    Metric("completion/max_length", "tokens", "Longest completion."),
    Metric("completion/truncation_rate", "share", "Completions cut off at rollout.max_completion_tokens."),
    Metric("train/loss", "loss", "Mean over updates of the mini-batch loss."),
    Metric("train/grad_norm", "norm", "Mean gradient norm before clipping."),
    Metric("train/grad_norm_max", "norm", "Largest gradient norm before clipping."),
    Metric("train/learning_rate", "rate", "Learning rate of the last update."),
    Metric("train/updates", "count", "Optimizer updates in this step."),
    Metric("tokens/rollout", "tokens", "Completion tokens of the step."),
    Metric("tokens/total", "tokens", "Completion tokens since the start of the run."),
    Metric("seconds/rollout", "s", "Time to sample; with rollout.max_lag = 1, to wait for what is sampled ahead.", volatile=True),
    Metric("seconds/teacher", "s", "Time to grade and score, recomputation included.", volatile=True),
    Metric("seconds/update", "s", "Time of all updates of the step.", volatile=True),
    Metric(
        "seconds/step",
        "s",
        "Whole step: rollout, scoring, credit, updates and the rollout file; not checkpoints and evaluations.",
        volatile=True,
    ),
    Metric("tokens_per_second/rollout", "tokens/s", "Sampled tokens per second of sampling.", volatile=True),
    Metric("tokens_per_second/teacher", "tokens/s", "Completion tokens per second of scoring.", volatile=True),
    Metric(
        "tokens_per_second/update",
        "tokens/s",
        "Completion tokens trained on (every epoch counts) per second of updates.",
        volatile=True,
    ),
    Metric(
        "memory/peak",
        "GiB",
        "Peak memory: of the accelerator if there is one, else resident memory of the process.",
        volatile=True,
    ),
)
NAMES = frozenset(metric.name for metric in METRICS)
VOLATILE = frozenset(metric.name for metric in METRICS if metric.volatile)


def step_metrics(
    *,
    step: int,
    policy_version: int,
    groups: Sequence[ScoredGroup],
    flat: CreditInput,
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
    num_tokens = int(flat.lengths.sum())
    values: dict[str, float | int | None] = {"step": step, "policy_version": policy_version}
    values |= _reward_metrics(groups, flat)
    values |= _credit_metrics(flat, credit)
    values |= _length_metrics(groups, flat)
    values |= _update_metrics(reports)
    values |= {f"teacher/{name}": value for name, value in (counts or {}).items()}
    values |= _per_teacher(groups, flat, credit, teacher_of or {})
    values |= _dropped(prompts, groups, teacher_of or {})
    if sampled:
        values |= _policy_metrics(groups, reports) | _ratio_metrics(reports)
        values["policy/lag"] = policy_version - len(reports) - groups[0].group.policy_version
    values |= {"tokens/rollout": num_tokens, "tokens/total": tokens_before + num_tokens}
    values |= {f"seconds/{name}": round(value, 4) for name, value in seconds.items()}
    trained = sum(report.num_tokens for report in reports)
    for phase, tokens in (("rollout", num_tokens), ("teacher", num_tokens), ("update", trained)):
        values[f"tokens_per_second/{phase}"] = round(tokens / seconds[phase], 1) if seconds.get(phase) else None
    values["memory/peak"] = round(peak_memory_gib(), 3)
    undeclared = {name for name in values if declared_name(name) not in NAMES}
    assert not undeclared, f"undeclared metrics: {undeclared}"
    return {name: _finite(value) for name, value in values.items()}


def declared_name(name: str) -> str:
    """The name in the table: teacher/math/gap is declared as teacher/NAME/gap."""
    return re.sub(r"^teacher/[^/]+/", "teacher/NAME/", name)


def _dropped(prompts: Sequence[Prompt], groups: Sequence[ScoredGroup], teacher_of: Mapping[str, str]) -> dict[str, int]:
    """How many of the step's prompts have no group, in all and by teacher."""
    there = {scored.group.prompt.id for scored in groups}
    lost = [prompt for prompt in prompts if prompt.id not in there]
    names = Counter(teacher_of[prompt.domain] for prompt in lost if prompt.domain in teacher_of)
    asked = {teacher_of[prompt.domain] for prompt in prompts if prompt.domain in teacher_of}
    return {"teacher/dropped_groups": len(lost)} | {f"teacher/{name}/dropped_groups": names[name] for name in asked}


def _per_teacher(
    groups: Sequence[ScoredGroup], flat: CreditInput, credit: Credit, teacher_of: Mapping[str, str]
) -> dict[str, float | int]:
    """Gap, reward and number of groups of every teacher that was asked in this step."""
    if not teacher_of or flat.teacher_logprobs is None:
        return {}
    names = [teacher_of[scored.group.prompt.domain] for scored in groups]
    tokens = [sum(map(len, scored.group.completions)) for scored in groups]
    gaps = (flat.behaviour_logprobs - flat.teacher_logprobs).double().split(tokens)
    rewards = credit.token_rewards.double().split(tokens)
    values: dict[str, float | int] = {}
    for name in sorted(set(names)):
        own = [i for i, each in enumerate(names) if each == name]
        values[f"teacher/{name}/gap"] = float(torch.cat([gaps[i] for i in own]).mean())
        values[f"teacher/{name}/reward"] = float(torch.cat([rewards[i] for i in own]).mean())
        values[f"teacher/{name}/groups"] = len(own)
    return values


def _reward_metrics(groups: Sequence[ScoredGroup], flat: CreditInput) -> dict[str, Any]:
    _, std = segment_mean_std(flat.rewards, flat.group_sizes)
    return {
        "reward/mean": float(flat.rewards.double().mean()),
        "reward/std_in_group": float(std.mean()),
        "reward/grader_errors": sum(scored.num_grader_errors for scored in groups),
    }


def _credit_metrics(flat: CreditInput, credit: Credit) -> dict[str, Any]:
    counts = tokens_per_group(flat.lengths, flat.group_sizes)
    _, std = segment_mean_std(credit.token_rewards, counts)
    largest = torch.stack([part.abs().max() for part in credit.advantages.split(counts.tolist())])
    values = {
        "token_reward/mean": float(credit.token_rewards.double().mean()),
        "token_reward/std_in_group": float(std.mean()),
        "advantage/degenerate_groups": float((largest == 0).double().mean()),
    }
    if flat.teacher_logprobs is not None:
        log_ratio = flat.teacher_logprobs - flat.behaviour_logprobs
        values["teacher/gap"] = float(-log_ratio.double().mean())
        values["token_reward/floor_share"] = float((log_ratio <= math.log(0.1)).double().mean())
        values |= _percentiles("teacher/log_ratio", log_ratio)
    return values


def _length_metrics(groups: Sequence[ScoredGroup], flat: CreditInput) -> dict[str, Any]:
    rollouts = [rollout for scored in groups for rollout in scored.group.rollouts]
    return {
        "completion/mean_length": float(flat.lengths.double().mean()),
        "completion/max_length": int(flat.lengths.max()),
        "completion/truncation_rate": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
    }


def _policy_metrics(groups: Sequence[ScoredGroup], reports: StepReport) -> dict[str, Any]:
    """The mismatch is that of recomputed log-probs or, where the sampled ones were taken over, of the first mini-batch."""
    sampled = torch.cat([rollout.logprobs for scored in groups for rollout in scored.group.rollouts]).double()
    change = torch.cat([part for scored in groups for part in scored.old_logprobs]).double() - sampled
    if not change.any():
        change = reports[0].log_ratio.double()
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
    ratio = torch.exp(torch.cat([report.log_ratio for report in reports]))
    return {
        "ratio/clip_share": sum(r.num_clipped for r in reports) / sum(r.num_tokens for r in reports),
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
