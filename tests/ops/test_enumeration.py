"""Expectations by enumeration: a vocabulary of 5, all sequences of one and of two tokens, float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.divergence import k2, k3, kl_divergence, proximal_teacher
from topd.ops.objective import clipped_surrogate
from topd.ops.proximal import proximal_reward
from topd.ops.returns import discounted

V = 5
ALPHAS = [0.05, 0.1, 0.2, 0.5, 0.9, 1.0]


def logits(seed, *shape, scale=1.5):
    return scale * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logprobs(values):
    return torch.log_softmax(values, dim=-1)


class Pair:
    """Student and teacher over two-token sequences: a distribution of the first token, and one of the second for each first."""

    def __init__(self, seed):
        self.student = (logits(seed), logits(seed + 1, V))
        self.teacher = (logprobs(logits(seed + 2)), logprobs(logits(seed + 3, V)))

    def leaves(self):
        return tuple(part.clone().requires_grad_() for part in self.student)

    @staticmethod
    def of_sequences(first, second):
        """Log-probs of the tokens of all 25 sequences, flat: sequence by sequence, two tokens each."""
        return torch.stack([first[:, None].expand(V, V), second], dim=-1).reshape(-1)


LENGTHS = torch.full((V * V,), 2)


# --- the expected reward


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(3))
def test_expected_reward_is_minus_kl_to_the_proximal_teacher(alpha, seed):
    student, teacher = logprobs(logits(seed)), logprobs(logits(seed + 50))
    expected_reward = (student.exp() * proximal_reward(teacher - student, alpha=alpha)).sum()
    mix = proximal_teacher(teacher, student, alpha=alpha)
    torch.testing.assert_close(expected_reward, -kl_divergence(student, mix))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_expected_reward_of_two_tokens_is_minus_the_sum_of_the_kls(alpha):
    pair = Pair(7)
    first, second = map(logprobs, pair.student)
    rewards = proximal_reward(pair.of_sequences(*pair.teacher) - pair.of_sequences(first, second), alpha=alpha)
    probability = (first[:, None] + second).exp().reshape(-1)
    expected_reward = (probability * rewards.reshape(-1, 2).sum(-1)).sum()
    kl_first = kl_divergence(first, proximal_teacher(pair.teacher[0], first, alpha=alpha))
    kl_second = kl_divergence(second, proximal_teacher(pair.teacher[1], second, alpha=alpha))
    torch.testing.assert_close(expected_reward, -(kl_first + (first.exp() * kl_second).sum()))


@pytest.mark.parametrize("skew", [0.1, 0.5, 0.8])
def test_expected_reward_is_minus_the_skewed_reverse_kl(skew):
    # skewed reverse KL: sum of q log(q / ((1 - skew) p + skew q)), q the student, p the teacher
    student, teacher = logprobs(logits(3)).exp(), logprobs(logits(4)).exp()
    skewed = sum(q * math.log(q / ((1 - skew) * p + skew * q)) for q, p in zip(student.tolist(), teacher.tolist(), strict=True))
    rewards = proximal_reward(teacher.log() - student.log(), alpha=1 - skew)
    assert (student * rewards).sum().item() == pytest.approx(-skewed)


def test_small_alpha_is_forward_and_alpha_one_reverse_kl():
    # gradient of E[reward], the reward held fixed: -alpha grad KL(teacher || student) for alpha -> 0, -grad KL(s || t) for 1
    values = logits(11).requires_grad_()
    teacher = logprobs(logits(12))

    def gradient_of(make):
        (gradient,) = torch.autograd.grad(make(logprobs(values)), values)
        return gradient

    def expected_reward(alpha):
        return lambda student: (student.exp() * proximal_reward(teacher - student, alpha=alpha).detach()).sum()

    small = gradient_of(expected_reward(1e-7)) / 1e-7
    torch.testing.assert_close(small, -gradient_of(lambda s: kl_divergence(teacher, s)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient_of(expected_reward(1.0)), -gradient_of(lambda s: kl_divergence(s, teacher)))


# --- the policy-gradient estimate


def expected_estimate(pair, alpha, to_returns):
    """Exact expectation, over all sequences, of the gradient of our per-token loss at ratio 1 (unnormalised credit)."""
    leaves = pair.leaves()
    current = pair.of_sequences(*map(logprobs, leaves))
    old = current.detach()
    rewards = proximal_reward(pair.of_sequences(*pair.teacher) - old, alpha=alpha)
    loss = clipped_surrogate(current - old, to_returns(rewards, LENGTHS), clip_low=0.2, clip_high=0.2)
    probability = old.reshape(-1, 2).sum(-1).exp()
    return torch.autograd.grad((probability * loss.reshape(-1, 2).sum(-1)).sum(), leaves), old


@pytest.mark.parametrize("alpha", ALPHAS)
def test_estimate_of_one_token_is_the_exact_gradient(alpha):
    values, teacher = logits(21).requires_grad_(), logprobs(logits(22))
    student = logprobs(values)
    old = student.detach()
    reward = proximal_reward(teacher - old, alpha=alpha)

    loss = clipped_surrogate(student - old, reward, clip_low=0.2, clip_high=0.2)
    (estimate,) = torch.autograd.grad((old.exp() * loss).sum(), values, retain_graph=True)

    (exact,) = torch.autograd.grad(-(student.exp() * reward).sum(), values, retain_graph=True)
    torch.testing.assert_close(estimate, exact)
    # the same as descending the KL to the proximal teacher, that held fixed: E[grad log pi] = 0
    (of_kl,) = torch.autograd.grad(kl_divergence(student, proximal_teacher(teacher, old, alpha=alpha)), values)
    torch.testing.assert_close(estimate, of_kl)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_estimate_of_two_tokens_with_immediate_returns_is_the_gradient_with_the_prefixes_held_fixed(alpha):
    pair = Pair(31)
    estimate, old = expected_estimate(pair, alpha, lambda rewards, lengths: rewards)
    leaves = pair.leaves()
    first, second = map(logprobs, leaves)
    rewards = proximal_reward(pair.of_sequences(*pair.teacher) - old, alpha=alpha).reshape(V, V, 2)
    objective = (first.exp() * rewards[:, 0, 0]).sum() + (first.detach().exp() * (second.exp() * rewards[..., 1]).sum(-1)).sum()
    exact = torch.autograd.grad(-objective, leaves)
    torch.testing.assert_close(estimate, exact)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_estimate_of_two_tokens_with_undiscounted_returns_is_the_gradient_of_the_whole_objective(alpha):
    pair = Pair(41)
    estimate, old = expected_estimate(pair, alpha, lambda rewards, lengths: discounted(rewards, lengths, discount=1.0))
    leaves = pair.leaves()
    first, second = map(logprobs, leaves)
    rewards = proximal_reward(pair.of_sequences(*pair.teacher) - old, alpha=alpha).reshape(V, V, 2).sum(-1)
    exact = torch.autograd.grad(-((first[:, None] + second).exp() * rewards).sum(), leaves)
    torch.testing.assert_close(estimate, exact)


# --- variance: Var(g) <= M^2 |V| max{ (log(1 - alpha))^2, C* alpha }, paper's theorem 4.2


C_STAR = 0.6476  # (log t)^2 / (t - 1) at t = 4.9216, the root of log t = 2 (1 - 1 / t)


def variance_and_bound(student, teacher, reward, alpha):
    """Total variance of g = reward * grad log pi (gradient by the logits), and the theorem's bound; over a batch of pairs."""
    probability = student.exp()
    score = torch.eye(V, dtype=torch.float64) - probability[..., None, :]  # [.., sampled token, logit]
    g = reward[..., None] * score
    mean = (probability[..., None] * g).sum(-2)
    variance = (probability * g.square().sum(-1)).sum(-1) - mean.square().sum(-1)
    norm = score.square().sum(-1).amax(-1)  # M^2
    return variance, norm * V * max(math.log1p(-alpha) ** 2, C_STAR * alpha)


def test_the_constant_of_the_bound():
    t = 4.9216
    assert math.log(t) == pytest.approx(2 * (1 - 1 / t), abs=1e-4)
    assert math.log(t) ** 2 / (t - 1) == pytest.approx(C_STAR, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0, 20.0])
def test_variance_bound_holds(alpha, scale):
    student, teacher = logprobs(logits(1, 2000, scale=scale)), logprobs(logits(2, 2000, scale=scale))
    reward = proximal_reward((teacher - student).reshape(-1), alpha=alpha).reshape(student.shape)
    variance, bound = variance_and_bound(student, teacher, reward, alpha)
    assert (variance <= bound).all()


def test_plain_log_ratio_breaks_the_bound_where_the_teacher_rejects_a_token():
    student = logprobs(torch.zeros(V, dtype=torch.float64))
    teacher = logprobs(torch.tensor([0.0, 0.0, 0.0, 0.0, -50.0], dtype=torch.float64))
    for alpha in (0.1, 0.2, 0.3):
        plain, bound = variance_and_bound(student, teacher, teacher - student, alpha)
        bounded, _ = variance_and_bound(student, teacher, proximal_reward(teacher - student, alpha=alpha), alpha)
        assert bounded <= bound < plain


# --- estimates of the KL


@given(st.integers(0, 10_000))
def test_k3_is_unbiased_and_k2_has_the_right_gradient(seed):
    values = logits(seed).requires_grad_()
    p, q = logprobs(values), logprobs(logits(seed + 1))
    exact = kl_divergence(p, q)
    torch.testing.assert_close((p.exp() * k3(q - p)).sum(), exact)
    (wanted,) = torch.autograd.grad(exact, values, retain_graph=True)
    (found,) = torch.autograd.grad((p.detach().exp() * k2(q - p)).sum(), values)
    torch.testing.assert_close(found, wanted)
