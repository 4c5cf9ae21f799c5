"""Stage 3 of 7. RolloutGroup -> ScoredGroup.

Before: rollout/embedded.py. After: algorithms/<type>.py.

Two log-probs with two jobs. The reward compares teacher and student scored by the same kind of engine, so that their noise
cancels; the ratio compares the trainer with itself. Where the engine's numbers are the trainer's (float32, embedded), both are
the sampled ones; otherwise the trainer recomputes its own before the first update, under the weights that sampled.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topd.errors import RunStopped
from topd.models.logprobs import score_groups
from topd.rollout.engine import Engine
from topd.tasks.grading import Grader
from topd.teacher.teacher import Scores, Teacher, Unscored
from topd.types import RolloutGroup, ScoredGroup

SLACK = 1e-4
"""A log-prob may exceed 0 by rounding."""


def score(
    groups: Sequence[RolloutGroup],
    *,
    grader: Grader,
    teacher: Teacher | None,
    engine: Engine | None,
    temperature: float,
    max_tokens: int,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[ScoredGroup | Unscored]:
    """Grade every completion, and add the log-probs credit and ratio need. A group that the teacher could not score is marked.

    `teacher`, `engine`: None for algorithms that ask for none or sample nothing. The trainer recomputes its own log-probs
    wherever those of the engine are not them already.
    """
    own = _own_logprobs(groups, engine, temperature=temperature, max_tokens=max_tokens)
    taught: Sequence[Scores | Unscored | None]
    taught = [None] * len(groups) if teacher is None else teacher.score(groups, on_tokens=on_tokens)
    kinds = {teacher and teacher.engine_kind, engine and engine.kind}
    same_noise = kinds == {"vllm"}
    scored: list[ScoredGroup | Unscored] = []
    for group, old, scores in zip(groups, own, taught, strict=True):
        if isinstance(scores, Unscored):
            scored.append(scores)
            continue
        _check_scores(group, scores)
        behaviour = tuple(rollout.logprobs for rollout in group.rollouts) if same_noise else old
        scored.append(_scored(group, old, behaviour, scores, grader))
    return scored


def kept(scored: Sequence[ScoredGroup | Unscored], max_dropped_share: float) -> list[ScoredGroup]:
    """The groups with scores. Raises RunStopped if too many have none."""
    reasons = [each.reason for each in scored if isinstance(each, Unscored)]
    if len(reasons) > max_dropped_share * len(scored) or len(reasons) == len(scored):
        shown = "; ".join(f"{reason} (x{count})" for reason, count in Counter(reasons).most_common(3))
        raise RunStopped(
            f"the teacher could not score {len(reasons)} of the step's {len(scored)} groups (teacher.max_dropped_share = "
            f"{max_dropped_share:g}): {shown}. Look at the servers with `topd probe`, then run the same command with "
            "--run.resume true: what was scored is kept."
        )
    return [each for each in scored if not isinstance(each, Unscored)]


def _own_logprobs(
    groups: Sequence[RolloutGroup], engine: Engine | None, *, temperature: float, max_tokens: int
) -> list[tuple[Tensor, ...]]:
    """The trainer's log-probs of sampled tokens, under the weights that sampled them, by the function it trains with."""
    model = engine.behaviour(groups[0].policy_version) if engine is not None else None
    if model is None:
        return [tuple(rollout.logprobs for rollout in group.rollouts) for group in groups]
    return score_groups(model, groups, max_tokens=max_tokens, temperature=temperature)


def _check_scores(group: RolloutGroup, scores: tuple[Tensor, ...] | None) -> None:
    """Raise RunStopped, before anything is stored, if a teacher's scores cannot be log-probs of the group's tokens."""
    for completion, logprobs in zip(group.completions, scores or (), strict=scores is not None):
        if len(logprobs) != len(completion) or bool(logprobs.isnan().any()) or float(logprobs.max()) > SLACK:
            raise RunStopped(
                f"the teacher's scores of prompt {group.prompt.id} are no log-probs (NaN, above 0, or too few). Nothing of this "
                "step was stored. Look at the teacher with `topd probe`, then run the same command with --run.resume true."
            )


def _scored(
    group: RolloutGroup,
    old: tuple[Tensor, ...],
    behaviour: tuple[Tensor, ...],
    from_teacher: tuple[Tensor, ...] | None,
    grader: Grader,
) -> ScoredGroup:
    errors_before = grader.num_errors
    rewards = torch.tensor([grader.grade(rollout.text, group.prompt.problem) for rollout in group.rollouts])
    return ScoredGroup(
        group=group,
        rewards=rewards,
        behaviour_logprobs=behaviour,
        old_logprobs=old,
        teacher_logprobs=from_teacher,
        num_grader_errors=grader.num_errors - errors_before,
    )
