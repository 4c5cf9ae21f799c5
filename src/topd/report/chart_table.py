"""Which curves a report shows: every metric of run/catalogue.py is in one of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from topd.run.catalogue import METRICS, declared_name

_AXIS = {"s": "seconds", "norm": "norm of the gradient", "rate": "learning rate", "count": "number", "score": "score in [0, 1]"}
UNITS = {metric.name: metric.unit for metric in METRICS}


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """What stands at its axis."""
        return _AXIS.get(self.unit, self.unit)


CHARTS = (
    Chart(id="grade", section="Result", title="Grade of the sampled completions", lines={"grade/mean": "mean"}),
    Chart(
        id="grade-spread",
        section="Result",
        title="Spread of the grades in a group",
        lines={"grade/std_in_group": "standard deviation"},
        note="Where it is 0, all completions of a prompt earn the same grade.",
    ),
    Chart(
        id="gap",
        section="Teacher",
        title="Gap to the teacher",
        lines={"teacher/gap": "reverse KL"},
        note="What distillation brings down: KL(student || teacher) per sampled token.",
    ),
    Chart(
        id="log-ratio",
        section="Teacher",
        title="Log-ratio of teacher to student",
        lines={
            "teacher/log_ratio_p01": "1st percentile",
            "teacher/log_ratio_p99": "99th percentile",
            "teacher/log_ratio_p50": "median",
        },
        band=True,
        note="The band holds 98 % of the sampled tokens; its lower end is the heavy tail.",
    ),
    Chart(
        id="token-reward",
        section="Teacher",
        title="Reward of a token",
        lines={"token_reward/mean": "mean"},
    ),
    Chart(
        id="token-reward-spread",
        section="Teacher",
        title="Spread of token rewards in a group",
        lines={"token_reward/std_in_group": "standard deviation"},
    ),
    Chart(
        id="floor",
        section="Teacher",
        title="Tokens that the teacher rejects",
        lines={"token_reward/floor_share": "share"},
        note="Tokens that the teacher gives at most a tenth of the student's probability.",
    ),
    Chart(
        id="degenerate",
        section="Teacher",
        title="Groups without signal",
        lines={"advantage/degenerate_groups": "share"},
        always=False,
    ),
    Chart(
        id="dropped",
        section="Teacher",
        title="Groups left out",
        lines={"teacher/dropped_groups": "dropped"},
        always=False,
    ),
    Chart(
        id="requests",
        section="Teacher",
        title="Requests to the teacher's servers",
        lines={"teacher/requests": "requests", "teacher/retries": "made again"},
        always=False,
    ),
    Chart(
        id="cached",
        section="Teacher",
        title="Completions scored before a resume",
        lines={"teacher/cached": "cached"},
        always=False,
    ),
    Chart(
        id="ratio",
        section="Update",
        title="Importance ratio",
        lines={"ratio/p01": "1st percentile", "ratio/p99": "99th percentile", "ratio/p50": "median"},
        band=True,
        note="The policy being updated against the one that sampled; the band holds 98 % of the tokens.",
    ),
    Chart(
        id="clip",
        section="Update",
        title="Tokens without gradient because of the clip",
        lines={"ratio/clip_share": "share"},
    ),
    Chart(
        id="entropy",
        section="Update",
        title="Entropy of the policy",
        lines={"policy/entropy": "estimate"},
        note="Minus the mean sampled log-prob. Falling to 0 means collapse.",
    ),
    Chart(
        id="grad-norm",
        section="Update",
        title="Gradient norm before clipping",
        lines={"train/grad_norm": "mean of the updates", "train/grad_norm_max": "largest"},
    ),
    Chart(id="loss", section="Update", title="Loss", lines={"train/loss": "mean of the updates"}),
    Chart(id="learning-rate", section="Update", title="Learning rate", lines={"train/learning_rate": "last update"}),
    Chart(id="updates", section="Update", title="Updates per step", lines={"train/updates": "updates"}),
    Chart(
        id="mismatch",
        section="Update",
        title="Engine against trainer",
        lines={"policy/mismatch_kl": "KL"},
        log=True,
        note="How far the sampling engine's probabilities are from the trainer's. Healthy: below 0.01.",
    ),
    Chart(id="lag", section="Update", title="Age of the sampling weights", lines={"policy/lag": "updates"}, always=False),
    Chart(
        id="length",
        section="Completions",
        title="Length of completions",
        lines={"completion/mean_length": "mean", "completion/max_length": "longest"},
    ),
    Chart(id="truncation", section="Completions", title="Completions cut off", lines={"completion/truncation_rate": "share"}),
    Chart(
        id="grader-errors",
        section="Completions",
        title="Grader errors",
        lines={"grade/grader_errors": "completions"},
        always=False,
    ),
    Chart(
        id="seconds",
        section="Speed",
        title="Seconds of a step by phase",
        lines={
            "seconds/rollout": "rollout",
            "seconds/teacher": "teacher",
            "seconds/update": "update",
            "seconds/step": "whole step",
        },
        stacked=True,
        note="Checkpoints and evaluations are not in it.",
    ),
    Chart(
        id="speed",
        section="Speed",
        title="Tokens per second by phase",
        lines={
            "tokens_per_second/rollout": "rollout",
            "tokens_per_second/teacher": "teacher",
            "tokens_per_second/update": "update",
        },
    ),
    Chart(id="tokens", section="Speed", title="Completion tokens of a step", lines={"tokens/rollout": "tokens"}),
    Chart(id="memory", section="Speed", title="Peak memory", lines={"memory/peak": "peak"}),
)

PER_TEACHER = {
    "gap": "Gap to each teacher",
    "token_reward": "Reward of a token by teacher",
    "groups": "Groups by teacher",
    "dropped_groups": "Groups left out by teacher",
}
"""Charts of teacher/NAME/..., which there are with several teachers."""
