"""Which curves a report shows: every metric of run/catalogue.py is in one of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from topd.run.catalogue import METRICS, declared_name

_AXIS = {"s": "seconds", "norm": "norm of the gradient", "rate": "learning rate", "count": "number", "score": "score in [0, 1]"}
UNITS = {metric.name: metric.unit for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture of some metrics. `band`: the first two lines are the ends of a band around the third."""

    id: str
    section: str
    title: str
    lines: Mapping[str, str]
    """Metric -> what its line is called."""
    note: str = ""
    band: bool = False
    stacked: bool = False
    log: bool = False
    always: bool = True
    """False: shown only if some number is not 0."""

    @property
    def unit(self) -> str:
        """The unit of its metrics; "unknown" of one that the catalogue does not hold."""
        return UNITS.get(declared_name(next(iter(self.lines))), "unknown")

    @property
    def axis(self) -> str:
        """Label of its axis."""
        return _AXIS.get(self.unit, self.unit)


CHARTS = (
    Chart("grade", "Result", "Grade of the sampled completions", {"grade/mean": "mean"}),
    Chart(
        "grade-spread",
        "Result",
        "Spread of the grades in a group",
        {"grade/std_in_group": "standard deviation"},
        note="Where it is 0, all completions of a prompt earn the same grade.",
    ),
    Chart(
        "gap",
        "Teacher",
        "Gap to the teacher",
        {"teacher/gap": "reverse KL"},
        note="What distillation brings down: KL(student || teacher) per sampled token.",
    ),
    Chart(
        "log-ratio",
        "Teacher",
        "Log-ratio of teacher to student",
        {
            "teacher/log_ratio_p01": "1st percentile",
            "teacher/log_ratio_p99": "99th percentile",
            "teacher/log_ratio_p50": "median",
        },
        note="The band holds 98 % of the sampled tokens; its lower end is the heavy tail.",
        band=True,
    ),
    Chart("token-reward", "Teacher", "Reward of a token", {"token_reward/mean": "mean"}),
    Chart(
        "token-reward-spread",
        "Teacher",
        "Spread of token rewards in a group",
        {"token_reward/std_in_group": "standard deviation"},
    ),
    Chart(
        "floor",
        "Teacher",
        "Tokens that the teacher rejects",
        {"token_reward/floor_share": "share"},
        note="Tokens that the teacher gives at most a tenth of the student's probability.",
    ),
    Chart("degenerate", "Teacher", "Groups without signal", {"advantage/degenerate_groups": "share"}, always=False),
    Chart("dropped", "Teacher", "Groups left out", {"teacher/dropped_groups": "dropped"}, always=False),
    Chart(
        "requests",
        "Teacher",
        "Requests to the teacher's servers",
        {"teacher/requests": "requests", "teacher/retries": "made again"},
        always=False,
    ),
    Chart("cached", "Teacher", "Completions scored before a resume", {"teacher/cached": "cached"}, always=False),
    Chart(
        "ratio",
        "Update",
        "Importance ratio",
        {"ratio/p01": "1st percentile", "ratio/p99": "99th percentile", "ratio/p50": "median"},
        note="The policy being updated against the one that sampled; the band holds 98 % of the tokens.",
        band=True,
    ),
    Chart("clip", "Update", "Tokens without gradient because of the clip", {"ratio/clip_share": "share"}),
    Chart(
        "entropy",
        "Update",
        "Entropy of the policy",
        {"policy/entropy": "estimate"},
        note="Minus the mean sampled log-prob. Falling to 0 means collapse.",
    ),
    Chart(
        "grad-norm",
        "Update",
        "Gradient norm before clipping",
        {"train/grad_norm": "mean of the updates", "train/grad_norm_max": "largest"},
    ),
    Chart("loss", "Update", "Loss", {"train/loss": "mean of the updates"}),
    Chart("learning-rate", "Update", "Learning rate", {"train/learning_rate": "last update"}),
    Chart("updates", "Update", "Updates per step", {"train/updates": "updates"}),
    Chart(
        "mismatch",
        "Update",
        "Engine against trainer",
        {"policy/mismatch_kl": "KL"},
        note="How far the sampling engine's probabilities are from the trainer's. Healthy: below 0.01.",
        log=True,
    ),
    Chart("lag", "Update", "Age of the sampling weights", {"policy/lag": "updates"}, always=False),
    Chart(
        "length", "Completions", "Length of completions", {"completion/mean_length": "mean", "completion/max_length": "longest"}
    ),
    Chart("truncation", "Completions", "Completions cut off", {"completion/truncation_rate": "share"}),
    Chart("grader-errors", "Completions", "Grader errors", {"grade/grader_errors": "completions"}, always=False),
    Chart(
        "seconds",
        "Speed",
        "Seconds of a step by phase",
        {"seconds/rollout": "rollout", "seconds/teacher": "teacher", "seconds/update": "update", "seconds/step": "whole step"},
        note="Checkpoints and evaluations are not in it.",
        stacked=True,
    ),
    Chart(
        "speed",
        "Speed",
        "Tokens per second by phase",
        {"tokens_per_second/rollout": "rollout", "tokens_per_second/teacher": "teacher", "tokens_per_second/update": "update"},
    ),
    Chart("tokens", "Speed", "Completion tokens of a step", {"tokens/rollout": "tokens"}),
    Chart("memory", "Speed", "Peak memory", {"memory/peak": "peak"}),
)

PER_TEACHER = {
    "gap": "Gap to each teacher",
    "token_reward": "Reward of a token by teacher",
    "groups": "Groups by teacher",
    "dropped_groups": "Groups left out by teacher",
}
"""Charts of teacher/NAME/..., which there are with several teachers."""
