import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.divergence import k2, k3, kl_divergence, proximal_teacher

logits = st.lists(st.floats(-8, 8), min_size=5, max_size=5)


def log_distribution(values):
    return torch.log_softmax(torch.tensor(values, dtype=torch.float64), dim=-1)


def test_kl_literal():
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75) = 0.5 (0.693147 - 0.405465) = 0.143841
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert kl_divergence(p, q).item() == pytest.approx(0.143841, abs=1e-6)


@given(logits, logits)
def test_kl_equals_the_loop_and_is_not_negative(first, second):
    p, q = log_distribution(first), log_distribution(second)
    expected = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert kl_divergence(p, q).item() == pytest.approx(expected, abs=1e-12)
    assert kl_divergence(p, q).item() >= -1e-12
    assert kl_divergence(p, p).item() == 0


def test_kl_where_p_is_zero_and_where_q_is_zero():
    half = torch.tensor([0.5, 0.5]).log()
    sure = torch.tensor([0.0, -math.inf])
    assert kl_divergence(sure, half).item() == pytest.approx(math.log(2))  # 1 log(1 / 0.5), the impossible token adds nothing
    assert kl_divergence(half, sure).item() == math.inf
    assert kl_divergence(sure, sure).item() == 0


def test_kl_is_over_the_last_axis():
    p = torch.log_softmax(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    q = torch.log_softmax(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)), dim=-1)
    found = kl_divergence(p, q)
    assert found.shape == (2, 3)
    assert found[1, 2].item() == pytest.approx(kl_divergence(p[1, 2], q[1, 2]).item())


@given(logits, logits, st.floats(1e-3, 1))
def test_proximal_teacher_is_the_mix_of_probabilities(first, second, alpha):
    teacher, student = log_distribution(first), log_distribution(second)
    mix = proximal_teacher(teacher, student, alpha=alpha)
    torch.testing.assert_close(mix.exp(), alpha * teacher.exp() + (1 - alpha) * student.exp())
    assert mix.exp().sum().item() == pytest.approx(1)


def test_proximal_teacher_where_the_teacher_rejects_a_token():
    teacher, student = torch.tensor([0.0, -math.inf]), torch.tensor([0.5, 0.5]).log()
    assert proximal_teacher(teacher, student, alpha=0.2).exp().tolist() == pytest.approx([0.6, 0.4])  # 0.2 + 0.4, 0 + 0.4
    assert proximal_teacher(teacher, student, alpha=1.0) is teacher


def test_estimates_literals():
    log_ratio = torch.tensor([0.0, math.log(2.0), -math.log(2.0)])
    assert k2(log_ratio).tolist() == pytest.approx([0.0, 0.2402265, 0.2402265])  # 0.6931472^2 / 2
    assert k3(log_ratio).tolist() == pytest.approx([0.0, 0.3068528, 0.1931472])  # 2 - 1 - log 2;  0.5 - 1 + log 2


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=10))
def test_k2_and_k3_are_never_negative(values):
    log_ratio = torch.tensor(values)
    assert (k2(log_ratio) >= 0).all()
    assert (k3(log_ratio) >= 0).all()


def test_k3_keeps_its_digits_near_zero():
    # x^2 / 2 + x^3 / 6 for small x; exp(x) - 1 - x in float64 would keep only 3 digits at 1e-6
    log_ratio = torch.tensor([1e-6, -1e-6], dtype=torch.float64)
    torch.testing.assert_close(k3(log_ratio), torch.full((2,), 5e-13, dtype=torch.float64), rtol=1e-3, atol=0)


def test_gradients_of_the_estimates():
    log_ratio = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    for estimate, slope in ((k2, lambda x: x), (k3, torch.expm1)):
        (gradient,) = torch.autograd.grad(estimate(log_ratio).sum(), log_ratio)
        torch.testing.assert_close(gradient, slope(log_ratio.detach()))
