"""Stage 5 of 7. ScoredGroup -> TrainBatch, the mini-batches of a step.

Before: algorithms/<type>.py (credit), on the evidence joined here. After: trainer/loss.py.
"""

import math
from collections.abc import Sequence

import numpy as np

from topd.algorithms.base import Weighting
from topd.ragged import Ragged
from topd.run.seeding import stream
from topd.types import Credit, ScoredGroup, TrainBatch


def flatten(groups: Sequence[ScoredGroup]) -> Ragged:
    """The evidence of all groups of a step, in order."""
    return Ragged.join([scored.evidence for scored in groups])


def make_batches(
    groups: Sequence[ScoredGroup],
    evidence: Ragged,
    credit: Credit,
    *,
    weighting: Weighting,
    minibatch_prompts: int,
    epochs: int,
    seed: tuple[int | str, ...],
) -> list[TrainBatch]:
    """The mini-batches of a step in the order of their updates: whole groups, reshuffled for every epoch.

    All have `minibatch_prompts` groups. If some groups were dropped, they are as equal as can be: a small one would make an
    update of full weight.
    """
    credited = evidence.adding(advantages=credit.advantages)
    batches = []
    for epoch in range(epochs):
        order = stream(*seed, epoch).permutation(len(groups))
        for picked in np.array_split(order, math.ceil(len(groups) / minibatch_prompts)):
            part = credited.take(picked.tolist())
            part = part.adding(weights=weighting(part.lengths, part.group_sizes))
            batches.append(TrainBatch(groups=tuple(groups[i].group for i in picked), streams=part))
    return batches
