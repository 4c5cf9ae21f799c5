"""Ragged data against plain lists, whatever the lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ragged import Ragged, Rows

GROUPS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)
"""Tokens of each completion of each group."""


def ragged(groups: list[list[int]], first: int = 0) -> Ragged:
    """Tokens and completions numbered in order."""
    shape = Ragged.of([[range(length) for length in group] for group in groups])
    tokens = first + torch.arange(float(shape.num_tokens))
    rollouts = {"number": first + torch.arange(len(shape.lengths))}
    return Ragged(
        lengths=shape.lengths,
        group_sizes=shape.group_sizes,
        tokens={"place": tokens, "pair": torch.stack([tokens, -tokens], dim=-1)},
        rollouts=rollouts,
    )


def nested(groups: list[list[int]]) -> list[list[list[float]]]:
    numbers = iter(range(10_000))
    return [[[float(next(numbers)) for _ in range(length)] for length in group] for group in groups]


@given(groups=GROUPS, data=st.data())
def test_what_is_cut_is_what_lists_give(groups: list[list[int]], data: st.DataObject) -> None:
    whole, plain = ragged(groups), nested(groups)
    pieces = []
    for group in data.draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=4)):
        start = data.draw(st.integers(0, len(groups[group]) - 1))
        pieces.append(Rows(group, start, data.draw(st.integers(start + 1, len(groups[group])))))
    cut = whole.cut(pieces)
    expected = [plain[piece.group][piece.start : piece.stop] for piece in pieces]
    assert [part.tolist() for part in cut.by_rollout("place")] == [completion for group in expected for completion in group]
    assert [part.tolist() for part in cut.by_group("place")] == [
        [x for completion in group for x in completion] for group in expected
    ]
    assert torch.equal(cut["pair"][:, 1], -cut["place"])
    assert torch.equal(whole["place"][whole.places(pieces)], cut["place"])
    firsts = torch.tensor([0, *map(len, groups)]).cumsum(0).tolist()
    assert cut["number"].tolist() == [firsts[p.group] + row for p in pieces for row in range(p.start, p.stop)]


@given(groups=GROUPS, order=st.randoms())
def test_groups_taken_and_joined_are_the_same_groups(groups: list[list[int]], order: object) -> None:
    whole = ragged(groups)
    picked = list(range(len(groups)))
    order.shuffle(picked)
    joined = Ragged.join([whole.take([i]) for i in picked])
    taken = whole.take(picked)
    assert joined.lengths.tolist() == taken.lengths.tolist()
    assert joined.group_sizes.tolist() == taken.group_sizes.tolist()
    assert all(torch.equal(joined[name], taken[name]) for name in ("place", "pair", "number"))
    back = taken.take([picked.index(i) for i in range(len(groups))])
    assert torch.equal(back["place"], whole["place"])
    assert taken.tokens_per_group.tolist() == [sum(groups[i]) for i in picked]


def test_only_streams_that_all_have_are_joined() -> None:
    one, other = ragged([[2]]), ragged([[1, 1]], first=2)
    joined = Ragged.join([one.adding(more=torch.ones(2)), other])
    assert "more" not in joined
    assert "place" in joined
    assert joined["place"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(KeyError, match="more"):
        joined["more"]
    assert one.tokens.keys() == {"place", "pair"}  # nothing is added in place
