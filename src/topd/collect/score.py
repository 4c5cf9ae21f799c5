"""Stage 3 of 7. RolloutGroup -> ScoredGroup.

Before: rollout/embedded.py. After: algorithms/<type>.py.

Two log-probs with two jobs. The reward compares teacher and student scored by the same kind of engine, so that their noise
cancels; the importance ratio compares the trainer with itself (`Sampler.ratio_logprobs`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from topd.errors import RunStopped
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.models.logprobs import score_groups
from topd.ragged import Ragged
from topd.rollout.engine import Engine
from topd.tasks.answers import in_context
from topd.tasks.grading import Grade, Grader
from topd.teacher.local import DEFAULT
from topd.teacher.teacher import Teacher, Unscored, broken_scores
from topd.types import RolloutGroup, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The engine that sampled, and the trainer's own weights to compare it with."""

    engine: Engine
    policy: LanguageModel
    """With the weights as they are now."""
    weights_of: Callable[[int], LanguageModel | None]
    """Policy version -> a model with those weights; None if there is none any more."""
    temperature: float
    max_tokens: int
    """Padded tokens in one forward pass."""
    max_mismatch_kl: float
    """Nats per token."""

    def ratio_logprobs(self, groups: Sequence[RolloutGroup]) -> list[tuple[Tensor, ...] | Unscored]:
        """The denominator of the importance ratio, by group: log-probs of the sampled tokens under the weights that sampled.

        - An exact engine: its own numbers, which are the trainer's.
        - The weights are still here: recomputed with them. Where the engine's numbers are too far off, other weights sampled.
        - The weights have moved on (max_lag > 1): the engine's own numbers, if they are near enough to the policy's.
        """
        rows: list[tuple[Tensor, ...] | Unscored] = []
        for version, members in itertools.groupby(groups, key=lambda group: group.policy_version):
            asked = list(members)
            if self.engine.exact:
                rows += map(_sampled, asked)
                continue
            model = self.weights_of(version)
            recomputed = score_groups(model or self.policy, asked, max_tokens=self.max_tokens, temperature=self.temperature)
            for group, own in zip(asked, recomputed, strict=True):
                if model is None:
                    rows.append(_too_old(_sampled(group), own, self.max_mismatch_kl) or _sampled(group))
                else:
                    rows.append(_sampled_elsewhere(_sampled(group), own, self.engine.tolerance) or own)
        return rows


def _sampled(group: RolloutGroup) -> tuple[Tensor, ...]:
    return tuple(rollout.logprobs for rollout in group.rollouts)


def score(
    groups: Sequence[RolloutGroup],
    *,
    grader: Grader,
    teacher: Teacher | None,
    wanted: Wanted = DEFAULT,
    sampler: Sampler | None,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[ScoredGroup | Unscored]:
    """Grade every completion, and add the log-probs that credit and ratio need. A group that cannot be used is marked.

    Grading goes on in its own processes while models score. `teacher`, `sampler`: None for algorithms that ask for none or
    sample nothing.
    """
    graded = [
        [grader.submit(in_context(group.prompt.text, rollout.text), group.prompt.problem) for rollout in group.rollouts]
        for group in groups
    ]
    own = sampler.ratio_logprobs(groups) if sampler is not None else map(_sampled, groups)
    taught: Sequence[Ragged | Unscored | None]
    taught = [None] * len(groups) if teacher is None else teacher.score(groups, wanted, on_tokens=on_tokens)
    same_noise = {teacher and teacher.engine_kind, sampler and sampler.engine.kind} == {"vllm"}
    scored: list[ScoredGroup | Unscored] = []
    for group, old, scores, grades in zip(groups, own, taught, graded, strict=True):
        if isinstance(scores, Unscored):
            scored.append(scores)
            continue
        if isinstance(old, Unscored):
            scored.append(old)
            continue
        if scores is not None:
            _check_scores(group, scores)
        behaviour = _sampled(group) if same_noise else old
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


def _sampled_elsewhere(sampled: tuple[Tensor, ...], own: tuple[Tensor, ...], tolerance: float | None) -> Unscored | None:
    """Reason to drop a group that other weights, or another distribution, sampled, as the engine's log-probs show."""
    off = float((torch.cat(sampled) - torch.cat(own)).abs().mean())
    if tolerance is None or off <= tolerance:
        return None
    return Unscored(
        f"completions were sampled with other weights, or at another temperature, than the trainer's: their log-probs are off by "
        f"{off:.2g} nats on average, {tolerance:g} allowed"
    )


def _too_old(sampled: tuple[Tensor, ...], current: tuple[Tensor, ...], bound: float) -> Unscored | None:
    """Reason to drop a group from which the policy has moved too far away: KL(sampled, policy) per token, estimator k3."""
    change = (torch.cat(current) - torch.cat(sampled)).double()
    kl = float((torch.expm1(change) - change).mean())
    if kl <= bound:
        return None
    return Unscored(
        f"completions are too old: the policy has moved away from the weights that sampled them by {kl:.2g} nats per token, "
        f"rollout.max_mismatch_kl = {bound:g} allowed"
    )


def _check_scores(group: RolloutGroup, scores: Ragged) -> None:
    """Raise RunStopped, before anything is stored, for broken scores."""
    broken = broken_scores(group, scores)
    if broken is not None:
        raise RunStopped(
            f"the teacher returned invalid log-probs for prompt {group.prompt.id} ({broken}). Nothing of this step was stored. "
            "Look at the teacher with `topd probe`, then run the same command with --run.resume true."
        )


def _scored(
    group: RolloutGroup,
    old: tuple[Tensor, ...],
    behaviour: tuple[Tensor, ...],
    from_teacher: Ragged | None,
    grades: Sequence[Grade],
) -> ScoredGroup:
    own = Ragged.of([group.completions]) if from_teacher is None else from_teacher
    return ScoredGroup(
        group=group,
        evidence=replace(
            own,
            tokens={"behaviour_logprobs": torch.cat(behaviour), "old_logprobs": torch.cat(old), **own.tokens},
            rollouts={"grades": torch.tensor([grade.grade for grade in grades])},
        ),
        num_grader_errors=sum(grade.error is not None for grade in grades),
    )
