import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.objective import clipped_surrogate, is_clipped, negative_log_likelihood

CLIP = dict(clip_low=0.2, clip_high=0.2)


def surrogate_loop(log_ratios, advantages, clip_low, clip_high):
    losses = []
    for log_importance, advantage in zip(log_ratios, advantages, strict=True):
        ratio = math.exp(log_importance)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        losses.append(-min(ratio * advantage, clipped * advantage))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),  # inside
        (1.5, 2.0, -2.4, True),  # min(3.0, 1.2 * 2)
        (0.5, 2.0, -1.0, False),  # min(1.0, 0.8 * 2): below the bound with a positive advantage still pulls back
        (0.5, -2.0, 1.6, True),  # min(-1.0, -1.6)
        (1.5, -2.0, 3.0, False),  # min(-3.0, -2.4)
        (1.5, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate_literals(ratio, advantage, loss, clipped):
    log_importance, advantages = torch.tensor([ratio]).log(), torch.tensor([advantage])
    assert clipped_surrogate(log_importance, advantages, **CLIP).item() == pytest.approx(loss, abs=1e-6)
    assert is_clipped(log_importance, advantages, **CLIP).item() is clipped


pairs = st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=12)


@given(pairs, st.floats(0.05, 0.9), st.floats(0.05, 2))
def test_clipped_surrogate_equals_the_loop(values, low, high):
    log_importance = torch.tensor([x for x, _ in values], dtype=torch.float64)
    advantages = torch.tensor([a for _, a in values], dtype=torch.float64)
    found = clipped_surrogate(log_importance, advantages, clip_low=low, clip_high=high)
    torch.testing.assert_close(found, surrogate_loop(log_importance.tolist(), advantages.tolist(), low, high))


@given(pairs)
def test_gradient_is_minus_ratio_times_advantage_or_zero_where_clipped(values):
    log_importance = torch.tensor([x for x, _ in values], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([a for _, a in values], dtype=torch.float64, requires_grad=True)
    clipped_surrogate(log_importance, advantages, **CLIP).sum().backward()
    ratio = log_importance.detach().exp()
    blocked = is_clipped(log_importance.detach(), advantages.detach(), **CLIP)
    expected = torch.where(blocked, 0.0, -ratio * advantages.detach())
    torch.testing.assert_close(log_importance.grad, expected)
    assert advantages.grad is None


def test_at_ratio_one_loss_and_gradient_are_minus_the_advantage_exactly():
    log_importance = torch.zeros(4, requires_grad=True)
    advantages = torch.tensor([1.5, -0.3, 0.0, 1e-8])
    loss = clipped_surrogate(log_importance, advantages, **CLIP)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantages)
    assert torch.equal(log_importance.grad, -advantages)


def test_one_token_does_not_move_another():
    log_importance = torch.tensor([0.1, -0.1, 0.0], requires_grad=True)
    clipped_surrogate(log_importance, torch.tensor([1.0, 2.0, 3.0]), **CLIP)[1].backward()
    assert log_importance.grad[0] == log_importance.grad[2] == 0


def test_extreme_ratios():
    # exp(50) is finite in float32 and the clipped side is chosen for a positive advantage; exp(-50) is 0
    log_importance, advantages = torch.tensor([50.0, -50.0, -50.0, -math.inf]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert clipped_surrogate(log_importance, advantages, **CLIP).tolist() == pytest.approx([-1.2, 0.0, 0.8, 0.8])
    assert is_clipped(log_importance, advantages, **CLIP).tolist() == [True, False, True, True]


@given(pairs)
def test_clipped_surrogate_without_an_active_clip_is_the_plain_policy_gradient(values):
    log_importance = torch.tensor([x / 100 for x, _ in values])
    advantages = torch.tensor([a for _, a in values])
    assert torch.equal(clipped_surrogate(log_importance, advantages, **CLIP), -log_importance.exp() * advantages)


def test_negative_log_likelihood():
    logprobs = torch.tensor([-0.5, -2.0, 0.0], requires_grad=True)
    loss = negative_log_likelihood(logprobs)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 2.0, 0.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0, -1.0]
