import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.weighting import group_token_mean, rollout_mean, token_mean, tokens_per_group

ALL = {"group_token_mean": group_token_mean, "rollout_mean": rollout_mean, "token_mean": token_mean}

groups_of_lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=5)


def flat(groups):
    return torch.tensor([x for group in groups for x in group]), torch.tensor([len(group) for group in groups])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # two groups: completions of 1 and 3 tokens, and one of 2
        ("group_token_mean", [1 / 8] * 4 + [1 / 4] * 2),  # 1 / (2 groups * 4 tokens), 1 / (2 groups * 2 tokens)
        ("rollout_mean", [1 / 3] + [1 / 9] * 3 + [1 / 6] * 2),  # 1 / (3 completions * its tokens)
        ("token_mean", [1 / 6] * 6),
    ],
)
def test_literals(name, expected):
    assert ALL[name](torch.tensor([1, 3, 2]), torch.tensor([2, 1])).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ALL)
@given(groups=groups_of_lengths)
def test_weights_are_positive_and_sum_to_one(name, groups):
    weights = ALL[name](*flat(groups))
    assert len(weights) == sum(map(sum, groups))
    assert weights.dtype == torch.float32
    assert (weights > 0).all()
    assert weights.double().sum().item() == pytest.approx(1, abs=1e-6)


@given(groups_of_lengths)
def test_every_share_is_what_its_name_says(groups):
    lengths, sizes = flat(groups)
    of_rollout = [part.sum().item() for part in rollout_mean(lengths, sizes).split(lengths.tolist())]
    assert of_rollout == pytest.approx([1 / len(lengths)] * len(lengths), abs=1e-6)
    of_group = [part.sum().item() for part in group_token_mean(lengths, sizes).split([sum(group) for group in groups])]
    assert of_group == pytest.approx([1 / len(groups)] * len(groups), abs=1e-6)
    assert len(set(token_mean(lengths, sizes).tolist())) == 1


def test_they_agree_on_one_completion():
    lengths, sizes = torch.tensor([7]), torch.tensor([1])
    for weighting in ALL.values():
        assert weighting(lengths, sizes).tolist() == pytest.approx([1 / 7] * 7)


@given(groups_of_lengths)
def test_tokens_per_group(groups):
    assert tokens_per_group(*flat(groups)).tolist() == [sum(group) for group in groups]


def test_small_shares_do_not_vanish():
    # 400 prompts with 100 000 tokens each: 1 / 4e7 is well inside float32
    weights = group_token_mean(torch.tensor([100_000]).repeat(8), torch.ones(8, dtype=torch.long))
    assert weights.double().sum().item() == pytest.approx(1, abs=1e-6)
