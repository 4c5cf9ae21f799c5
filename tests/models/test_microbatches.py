"""Micro-batches are as large as the limit allows, and never larger, whatever the lengths of prompts and completions."""

import random

import pytest

from tests.fakes import ragged_groups
from topd.models.logprobs import microbatches, rows_of


@pytest.mark.parametrize("seed", range(20))
def test_padded_tokens_are_never_more_than_the_limit(seed: int) -> None:
    draw = random.Random(seed)
    shapes = [(draw.randint(1, 30), tuple(draw.randint(1, 12) for _ in range(draw.randint(1, 4)))) for _ in range(12)]
    groups = ragged_groups(*shapes)
    batches = list(microbatches(groups, 100))
    for pieces in (rows_of(groups, pieces) for pieces in batches):
        rows = sum(len(piece.completions) for piece in pieces)
        width = max(len(piece.prompt_ids) for piece in pieces) + max(len(c) for piece in pieces for c in piece.completions)
        assert rows * width <= 100 or rows == 1
    rows = sorted((piece.group, row) for pieces in batches for piece in pieces for row in range(piece.start, piece.stop))
    assert rows == [(i, row) for i, group in enumerate(groups) for row in range(len(group.completions))]


def test_every_batch_begins_empty() -> None:
    assert [len(pieces) for pieces in microbatches(ragged_groups(*[(2, (3,))] * 9), 10)] == [2, 2, 2, 2, 1]
