"""Every metric of metrics.jsonl, declared in one table; docs/metrics.md is generated from it, and from run/healthy.py.

Volatile metrics (times, throughput, memory) differ between two runs of the same configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topd.run.healthy import HEALTHY, Healthy


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    unit: str
    meaning: str
    volatile: bool = False

    @property
    def healthy(self) -> Healthy | None:
        """Expected values; None if there is no expectation."""
        return HEALTHY.get(self.name)


METRICS = (
    Metric("step", "count", "Rollout batches done."),
    Metric("policy_version", "count", "Optimizer updates done, after this step."),
    Metric("grade/mean", "score in [0, 1]", "Mean grade of the completions."),
    Metric("grade/std_in_group", "score", "Mean over groups of the standard deviation of grades in a group."),
    Metric("grade/grader_errors", "completions", "Completions on which the grader raised; they get grade 0."),
    Metric("token_reward/mean", "nats", "Mean per-token reward that credit is made of."),
    Metric(
        "token_reward/floor_share",
        "share",
        "Tokens that the teacher gives at most a tenth of the student's probability.",
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
    Metric("teacher/NAME/token_reward", "nats", "token_reward/mean over them."),
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
    Metric("seconds/rollout", "s", "Time to sample; with rollout.max_lag, to wait for what is sampled ahead.", volatile=True),
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


def renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl under the names of today: earlier versions called grades rewards."""
    return {re.sub(r"^reward/", "grade/", re.sub(r"^(teacher/[^/]+)/reward$", r"\1/token_reward", key)): row[key] for key in row}


def declared_name(name: str) -> str:
    """The name in the table: teacher/math/gap is declared as teacher/NAME/gap."""
    return re.sub(r"^teacher/[^/]+/", "teacher/NAME/", name)
