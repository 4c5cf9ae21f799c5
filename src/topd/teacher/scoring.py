"""Stage 3 of 7. RolloutGroup -> ScoredGroup.

Before: rollout/embedded.py. After: algorithms/<type>.py.

Two log-probs with two jobs. The reward compares teacher and student scored by the same kind of engine, so that their noise
cancels; the ratio compares the trainer with itself. Where the engine's numbers are the trainer's (float32, embedded), both are
the sampled ones; otherwise the trainer recomputes its own before the first update, under the weights that sampled.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from topd.errors import RunStopped
from topd.models.logprobs import SLACK, score_groups
from topd.ragged import Ragged
from topd.rollout.engine import Engine
from topd.tasks.answers import in_context
from topd.tasks.grading import Grade, Grader
from topd.teacher.teacher import Scores, Teacher, Unscored
from topd.types import RolloutGroup, ScoredGroup


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

    Grading goes on in its own processes while models score.

    `teacher`, `engine`: None for algorithms that ask for none or sample nothing. The trainer recomputes its own log-probs
    wherever those of the engine are not them already.
    """
    graded = [
        [grader.submit(in_context(group.prompt.text, rollout.text), group.prompt.problem) for rollout in group.rollouts]
        for group in groups
    ]
    own = _own_logprobs(groups, engine, temperature=temperature, max_tokens=max_tokens)
    taught: Sequence[Scores | Unscored | None]
    taught = [None] * len(groups) if teacher is None else teacher.score(groups, on_tokens=on_tokens)
    same_noise = {teacher and teacher.engine_kind, engine and engine.kind} == {"vllm"}
    tolerance = engine.tolerance if engine is not None else None
    scored: list[ScoredGroup | Unscored] = []
    for group, old, scores, grades in zip(groups, own, taught, graded, strict=True):
        fault = scores if isinstance(scores, Unscored) else _sampled_elsewhere(group, old, tolerance)
        if fault is not None:
            scored.append(fault)
            continue
        assert not isinstance(scores, Unscored)
        _check_scores(group, scores)
        behaviour = tuple(rollout.logprobs for rollout in group.rollouts) if same_noise else old
        scored.append(_scored(group, old, behaviour, scores, [grade.result() for grade in grades]))
    return scored


def kept(
    groups: Sequence[RolloutGroup],
    scored: Sequence[ScoredGroup | Unscored],
    *,
    max_dropped_share: Mapping[str, float],
    teacher_of: Mapping[str, str],
) -> list[ScoredGroup]:
    """The groups that can be trained on. Raises RunStopped if too many of one teacher's cannot.

    `max_dropped_share`: of each teacher, by the name of its section. `teacher_of`: domain -> teacher, where there are several.
    """
    [single] = max_dropped_share if len(max_dropped_share) == 1 else [""]
    lost: dict[str, list[str | None]] = {}
    for group, each in zip(groups, scored, strict=True):
        reason = each.reason if isinstance(each, Unscored) else None
        lost.setdefault(teacher_of.get(group.prompt.domain, single), []).append(reason)
    for name, outcomes in lost.items():
        reasons = [reason for reason in outcomes if reason is not None]
        allowed = max_dropped_share.get(name, 0.0)
        if len(reasons) > allowed * len(outcomes) or len(reasons) == len(outcomes):
            section = f"teachers.{name}" if teacher_of else "teacher"
            shown = "; ".join(f"{reason} (x{count})" for reason, count in Counter(reasons).most_common(3))
            raise RunStopped(
                f"{len(reasons)} of the step's {len(outcomes)} groups could not be scored ({section}.max_dropped_share = "
                f"{allowed:g}): {shown}. Look at the servers with `topd probe`, then run the same command with "
                "--run.resume true: what was scored is kept."
            )
    return [each for each in scored if not isinstance(each, Unscored)]


def _sampled_elsewhere(group: RolloutGroup, own: tuple[Tensor, ...], tolerance: float | None) -> Unscored | None:
    """Whether the engine's log-probs show that other weights, or another distribution, sampled a group."""
    if tolerance is None:
        return None
    sampled = torch.cat([rollout.logprobs for rollout in group.rollouts])
    off = float((sampled - torch.cat(own)).abs().mean())
    if off <= tolerance:
        return None
    return Unscored(
        f"completions were sampled with other weights, or at another temperature, than the trainer's: their log-probs are off by "
        f"{off:.2g} nats on average, {tolerance:g} allowed"
    )


def _own_logprobs(
    groups: Sequence[RolloutGroup], engine: Engine | None, *, temperature: float, max_tokens: int
) -> list[tuple[Tensor, ...]]:
    """The trainer's log-probs of sampled tokens, under the weights that sampled them, by the function it trains with."""
    model = engine.behaviour(groups[0].policy_version) if engine is not None else None
    if model is None:
        return [tuple(rollout.logprobs for rollout in group.rollouts) for group in groups]
    return score_groups(model, groups, max_tokens=max_tokens, temperature=temperature)


def broken_scores(group: RolloutGroup, scores: Scores) -> str | None:
    """Why these cannot be log-probs of the group's tokens, if they cannot."""
    for completion, logprobs in zip(group.completions, scores, strict=True):
        if len(logprobs) != len(completion):
            return f"{len(logprobs)} numbers for {len(completion)} tokens"
        if bool(logprobs.isnan().any()) or float(logprobs.max()) > SLACK:
            return "NaN or above 0: the teacher's weights or server are broken"
    return None


def _check_scores(group: RolloutGroup, scores: Scores | None) -> None:
    """Raise RunStopped, before anything is stored, for broken scores."""
    broken = None if scores is None else broken_scores(group, scores)
    if broken is not None:
        raise RunStopped(
            f"the teacher's scores of prompt {group.prompt.id} are no log-probs ({broken}). Nothing of this step was stored. "
            "Look at the teacher with `topd probe`, then run the same command with --run.resume true."
        )


def _scored(
    group: RolloutGroup,
    old: tuple[Tensor, ...],
    behaviour: tuple[Tensor, ...],
    from_teacher: tuple[Tensor, ...] | None,
    grades: Sequence[Grade],
) -> ScoredGroup:
    streams = {"behaviour_logprobs": behaviour, "old_logprobs": old, "teacher_logprobs": from_teacher}
    return ScoredGroup(
        group=group,
        evidence=replace(
            Ragged.of([group.completions]),
            tokens={name: torch.cat(parts) for name, parts in streams.items() if parts is not None},
            rollouts={"rewards": torch.tensor([grade.grade for grade in grades])},
        ),
        num_grader_errors=sum(grade.error is not None for grade in grades),
    )
