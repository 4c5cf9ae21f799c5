"""Stage 5 of 7. ScoredGroup -> mini-batches of TrainGroup.

Before: algorithms/<type>.py (credit), on the flat streams made here. After: trainer/loss.py.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from topd.algorithms.base import Weighting
from topd.run.seeding import stream
from topd.types import Credit, CreditInput, ScoredGroup, TrainBatch, TrainGroup


def flatten(groups: Sequence[ScoredGroup]) -> CreditInput:
    """All groups of a step as flat streams, in order."""
    lengths = [len(completion) for scored in groups for completion in scored.group.completions]
    has_teacher = all(scored.teacher_logprobs is not None for scored in groups)
    return CreditInput(
        lengths=torch.tensor(lengths),
        group_sizes=torch.tensor([len(scored.group.rollouts) for scored in groups]),
        rewards=torch.cat([scored.rewards for scored in groups]),
        behaviour_logprobs=torch.cat([part for scored in groups for part in scored.behaviour_logprobs]),
        teacher_logprobs=torch.cat([part for scored in groups for part in scored.teacher_logprobs or ()])
        if has_teacher
        else None,
    )


def make_batches(
    groups: Sequence[ScoredGroup],
    credit: Credit,
    *,
    weighting: Weighting,
    minibatch_prompts: int,
    epochs: int,
    seed: tuple[int | str, ...],
) -> list[TrainBatch]:
    """The mini-batches of a step in the order of their updates: whole groups, shuffled anew for every epoch.

    All have `minibatch_prompts` groups. If some groups were dropped, they are as equal as can be: a small one would make an
    update of full weight.
    """
    sizes = [sum(map(len, scored.group.completions)) for scored in groups]
    advantages = credit.advantages.split(sizes)
    batches = []
    for epoch in range(epochs):
        order = stream(*seed, epoch).permutation(len(groups))
        for picked in np.array_split(order, math.ceil(len(groups) / minibatch_prompts)):
            batches.append(_batch([groups[i] for i in picked], [advantages[i] for i in picked], weighting))
    return batches


def _batch(groups: Sequence[ScoredGroup], advantages: Sequence[torch.Tensor], weighting: Weighting) -> TrainBatch:
    completions = [scored.group.completions for scored in groups]
    lengths = torch.tensor([len(completion) for of_group in completions for completion in of_group])
    weights = weighting(lengths, torch.tensor([len(of_group) for of_group in completions]))
    per_group = weights.split([sum(map(len, of_group)) for of_group in completions])
    return TrainBatch(
        groups=tuple(
            TrainGroup(
                prompt_id=scored.group.prompt.id,
                prompt_ids=scored.group.prompt.token_ids,
                completions=of_group,
                old_logprobs=torch.cat(scored.old_logprobs),
                advantages=advantage,
                weights=weight,
            )
            for scored, of_group, advantage, weight in zip(groups, completions, advantages, per_group, strict=True)
        )
    )
