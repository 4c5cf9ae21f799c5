import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.returns import discounted, immediate_plus_mean_future

ALL = {
    "mean_of_future": immediate_plus_mean_future,
    "discounted": lambda rewards, lengths: discounted(rewards, lengths, discount=0.9),
}

completions = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9), min_size=1, max_size=6)


def flat(parts):
    return torch.tensor([x for part in parts for x in part]), torch.tensor([len(part) for part in parts])


def eq8_loop(parts):
    """Eq. 8 as it is written, token by token."""
    returns = []
    for rewards in parts:
        for k, reward in enumerate(rewards):
            later = rewards[k + 1 :]
            returns.append(reward + (sum(later) / len(later) if later else 0.0))
    return torch.tensor(returns)


def discounted_loop(parts, discount):
    returns = []
    for rewards in parts:
        for k in range(len(rewards)):
            returns.append(sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))))
    return torch.tensor(returns)


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        # 1 + (2 + 6) / 2, 2 + 6 / 1, 6
        ([1.0, 2.0, 6.0], [3], [5.0, 8.0, 6.0]),
        # the second completion starts afresh: 4 + 2 / 1, 2
        ([1.0, 2.0, 6.0, 4.0, 2.0], [3, 2], [5.0, 8.0, 6.0, 6.0, 2.0]),
        ([3.0], [1], [3.0]),
        ([3.0, -1.0, 2.0], [1, 1, 1], [3.0, -1.0, 2.0]),
        # a constant reward c: c + c everywhere but at the last token
        ([0.5] * 4, [4], [1.0, 1.0, 1.0, 0.5]),
    ],
    ids=["one", "two", "one token", "one token each", "constant"],
)
def test_eq8_literals(rewards, lengths, expected):
    assert immediate_plus_mean_future(torch.tensor(rewards), torch.tensor(lengths)).tolist() == pytest.approx(expected)


@given(completions)
def test_eq8_equals_the_loop(parts):
    torch.testing.assert_close(immediate_plus_mean_future(*flat(parts)), eq8_loop(parts), atol=1e-5, rtol=1e-5)


@given(completions, st.floats(0, 1))
def test_discounted_equals_the_loop(parts, discount):
    found = discounted(*flat(parts), discount=discount)
    torch.testing.assert_close(found, discounted_loop(parts, discount).float(), atol=1e-4, rtol=1e-5)


def test_discounted_literal():
    # 1 + 0.5 (2 + 0.5 * 4) = 3;  2 + 0.5 * 4 = 4;  4  |  8
    assert discounted(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]), discount=0.5).tolist() == [3.0, 4.0, 4.0, 8.0]


@given(completions)
def test_discount_zero_is_immediate_and_one_is_the_plain_sum(parts):
    rewards, lengths = flat(parts)
    assert torch.equal(discounted(rewards, lengths, discount=0.0), rewards)
    sums = torch.cat([torch.tensor(part).flip(0).cumsum(0).flip(0) for part in parts])
    torch.testing.assert_close(discounted(rewards, lengths, discount=1.0), sums, atol=1e-4, rtol=1e-5)


def test_no_completions_give_no_returns():
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert len(discounted(empty, none, discount=0.9)) == 0
    assert len(immediate_plus_mean_future(empty, none)) == 0


@pytest.mark.parametrize("name", ALL)
@given(parts=completions, before=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=9))
def test_other_completions_do_not_matter(name, parts, before):
    alone = ALL[name](*flat(parts))
    torch.testing.assert_close(ALL[name](*flat([*parts, before]))[: len(alone)], alone, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(ALL[name](*flat([before, *parts]))[len(before) :], alone, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_inputs_are_unchanged(name):
    rewards, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 1])
    ALL[name](rewards, lengths)
    assert rewards.tolist() == [1.0, 2.0, 3.0]
    assert lengths.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_dtype_is_kept(name, dtype):
    assert ALL[name](torch.ones(3, dtype=dtype), torch.tensor([2, 1])).dtype == dtype


def test_eq8_after_a_long_batch_keeps_its_digits():
    # one running sum of 100 000 tokens of about 10 nats, then a completion of small rewards: float32 sums would lose them
    big = torch.full((100_000,), 10.123, dtype=torch.float32)
    small = [[1e-3, 2e-3, 4e-3]]
    rewards, lengths = torch.cat([big, flat(small)[0]]), torch.tensor([100_000, 3])
    torch.testing.assert_close(immediate_plus_mean_future(rewards, lengths)[-3:], eq8_loop(small), atol=1e-8, rtol=1e-5)


def test_gradient_of_eq8_reaches_every_later_token_only():
    # d return_1 / d rewards = [1, 1/2, 1/2] in a completion of 3, and 0 in the other completion
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    immediate_plus_mean_future(rewards, torch.tensor([3, 1]))[0].backward()
    assert rewards.grad.tolist() == pytest.approx([1.0, 0.5, 0.5, 0.0])
