"""Stage 3 of 7. RolloutGroup -> ScoredGroup.

Before: rollout/embedded.py. After: algorithms/<type>.py.

Two log-probs with two jobs. The reward compares teacher and student scored by the same kind of engine, so that their noise
cancels; the ratio compares the trainer with itself. Where the engine's numbers are the trainer's (float32, embedded), both are
the sampled ones; otherwise the trainer recomputes its own before the first update.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topd.errors import RunStopped
from topd.models.language_model import LanguageModel
from topd.models.logprobs import score_groups
from topd.tasks.grading import Grader
from topd.teacher.teacher import Teacher
from topd.types import RolloutGroup, ScoredGroup

SLACK = 1e-4
"""A log-prob may exceed 0 by rounding."""


def score(
    groups: Sequence[RolloutGroup],
    *,
    grader: Grader,
    teacher: Teacher | None,
    recompute: Callable[[Sequence[RolloutGroup]], list[tuple[Tensor, ...]]] | None,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[ScoredGroup]:
    """Grade every completion, and add the log-probs credit and ratio need.

    `teacher`: None for algorithms that do not ask for one. `recompute`: the trainer's own log-probs, or None where the
    sampled ones already are.
    """
    sampled = [tuple(rollout.logprobs for rollout in group.rollouts) for group in groups]
    own = sampled if recompute is None else recompute(groups)
    taught = [None] * len(groups) if teacher is None else teacher.score(groups, on_tokens=on_tokens)
    for group, scores in zip(groups, taught, strict=True):
        _check_scores(group, scores)
    return [_scored(group, old, from_teacher, grader) for group, old, from_teacher in zip(groups, own, taught, strict=True)]


def _check_scores(group: RolloutGroup, scores: tuple[Tensor, ...] | None) -> None:
    """Raise RunStopped, before anything is stored, if a teacher's scores cannot be log-probs of the group's tokens."""
    for completion, logprobs in zip(group.completions, scores or (), strict=scores is not None):
        if len(logprobs) != len(completion) or bool(logprobs.isnan().any()) or float(logprobs.max()) > SLACK:
            raise RunStopped(
                f"the teacher's scores of prompt {group.prompt.id} are no log-probs (NaN, above 0, or too few). Nothing of this "
                "step was stored. Look at the teacher with `topd probe`, then run the same command with --run.resume true."
            )


def _scored(group: RolloutGroup, old: tuple[Tensor, ...], from_teacher: tuple[Tensor, ...] | None, grader: Grader) -> ScoredGroup:
    errors_before = grader.num_errors
    rewards = torch.tensor([grader.grade(rollout.text, group.prompt.problem) for rollout in group.rollouts])
    return ScoredGroup(
        group=group,
        rewards=rewards,
        behaviour_logprobs=old,
        old_logprobs=old,
        teacher_logprobs=from_teacher,
        num_grader_errors=grader.num_errors - errors_before,
    )


def recomputation(
    policy: LanguageModel, *, temperature: float, max_tokens: int
) -> Callable[[Sequence[RolloutGroup]], list[tuple[Tensor, ...]]]:
    """The trainer's own log-probs of sampled tokens, by the function it trains with."""
    return lambda groups: score_groups(policy, groups, max_tokens=max_tokens, temperature=temperature)
