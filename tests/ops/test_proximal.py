import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import topd
from topd.algorithms import topd as algorithm
from topd.ops.advantage import normalize_over_tokens
from topd.ops.proximal import clipped_reward, floor_reward, in_agreement, power_reward, proximal_reward, without_rounding
from topd.ops.returns import immediate_plus_mean_future

STUDENT = (torch.tensor([-0.5, -1.0, -0.2]), torch.tensor([-0.4, -0.1]))
TEACHER = (torch.tensor([-0.3, -2.0, -0.2]), torch.tensor([-0.1, -0.6]))

# alpha = 0.2, by hand for the first token: log(0.2 exp(0.2) + 0.8) = log(1.0442806) = 0.043328
REWARDS = [0.043328, -0.135160, 0.000000, 0.067632, -0.081963]
# first completion: 0.043328 + (-0.135160 + 0) / 2 = -0.024252; -0.135160 + 0; 0.  Second: 0.067632 - 0.081963; -0.081963
RETURNS = [-0.024252, -0.135160, 0.000000, -0.014331, -0.081963]
# mean -0.051141, unbiased std 0.056353
ADVANTAGES = {0.2: [0.4772, -1.4909, 0.9075, 0.6532, -0.5469], 0.1: [0.4939, -1.4815, 0.8833, 0.6749, -0.5705]}


def test_vector_step_by_step():
    rewards = proximal_reward(torch.cat(TEACHER) - torch.cat(STUDENT), alpha=0.2)
    returns = immediate_plus_mean_future(rewards, torch.tensor([3, 2]))
    advantages = normalize_over_tokens(returns, torch.tensor([5]), std_floor=1e-6)
    torch.testing.assert_close(rewards, torch.tensor(REWARDS), atol=2e-6, rtol=0)
    torch.testing.assert_close(returns, torch.tensor(RETURNS), atol=2e-6, rtol=0)
    torch.testing.assert_close(advantages, torch.tensor(ADVANTAGES[0.2]), atol=1e-4, rtol=0)
    assert returns.mean().item() == pytest.approx(-0.051141, abs=2e-6)
    assert returns.std().item() == pytest.approx(0.056353, abs=2e-6)


@pytest.mark.parametrize("alpha", ADVANTAGES)
def test_vector_through_the_public_function(alpha):
    advantages = topd.topd_advantages(TEACHER, STUDENT, alpha=alpha)
    assert [len(part) for part in advantages] == [3, 2]
    torch.testing.assert_close(torch.cat(advantages), torch.tensor(ADVANTAGES[alpha]), atol=1e-4, rtol=0)


TABLE = [  # log-ratio, then the reward at alpha 0.1, 0.2, 0.3
    (-10, -0.1054, -0.2231, -0.3567),
    (-2, -0.0904, -0.1899, -0.3003),
    (-1, -0.0653, -0.1352, -0.2103),
    (-0.1, -0.0096, -0.0192, -0.0290),
    (0.1, 0.0105, 0.0208, 0.0311),
    (1, 0.1586, 0.2954, 0.4157),
    (5, 2.7563, 3.4172, 3.8116),
    (10, 7.6978, 8.3907, 8.7961),
]


@pytest.mark.parametrize(("column", "alpha"), [(1, 0.1), (2, 0.2), (3, 0.3)], ids=["alpha=0.1", "alpha=0.2", "alpha=0.3"])
def test_table_of_values(column, alpha):
    log_ratio = torch.tensor([float(row[0]) for row in TABLE])
    expected = torch.tensor([row[column] for row in TABLE])
    torch.testing.assert_close(proximal_reward(log_ratio, alpha=alpha), expected, atol=6e-5, rtol=0)


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=20), st.floats(1e-3, 0.999))
def test_proximal_reward_equals_the_formula_in_float64(log_ratios, alpha):
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    expected = [math.log(alpha * math.exp(x) + 1 - alpha) for x in log_ratios]
    torch.testing.assert_close(
        proximal_reward(log_ratio, alpha=alpha), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
    )


@given(
    st.lists(st.floats(-3.0000000054977558e38, 3.0000000054977558e38, width=32) | st.just(-math.inf), min_size=1, max_size=20),
    st.floats(1e-3, 0.999),
)
def test_proximal_reward_is_finite_and_bounded_below(log_ratios, alpha):
    rewards = proximal_reward(torch.tensor(log_ratios), alpha=alpha)
    assert torch.isfinite(rewards).all()
    assert (rewards >= torch.tensor(math.log1p(-alpha), dtype=torch.float32)).all()


@given(st.floats(-50, 50, width=32), st.floats(-50, 50, width=32), st.floats(1e-3, 1))
def test_proximal_reward_is_monotone_and_between_zero_and_the_log_ratio(x, y, alpha):
    lower, upper = proximal_reward(torch.tensor([min(x, y), max(x, y)]), alpha=alpha).tolist()
    assert lower <= upper
    # the mix lies between the two probabilities: log(mix / student) lies between 0 and log(teacher / student)
    for value, reward in zip((min(x, y), max(x, y)), (lower, upper), strict=True):
        assert min(0, value) - 1e-6 <= reward <= max(0, value) + 1e-5


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [
        (0.0, 0.0),  # log(alpha + 1 - alpha)
        (-50.0, math.log(0.8)),  # 0.2 exp(-50) vanishes beside 0.8
        (50.0, 50 + math.log(0.2)),  # 0.8 vanishes beside 0.2 exp(50)
        (-math.inf, math.log(0.8)),
        (200.0, 200 + math.log(0.2)),  # exp(200) overflows float32
    ],
)
def test_proximal_reward_at_extremes(log_ratio, expected):
    assert proximal_reward(torch.tensor([log_ratio]), alpha=0.2).item() == pytest.approx(expected, abs=1e-5)


def test_alpha_one_is_the_log_ratio():
    log_ratio = torch.tensor([-50.0, -1.0, 0.0, 3.0, 50.0])
    assert torch.equal(proximal_reward(log_ratio, alpha=1.0), log_ratio)
    # and it is the limit: alpha just below 1 gives nearly the same where the ratio is not tiny
    torch.testing.assert_close(proximal_reward(log_ratio[1:], alpha=1 - 1e-6), log_ratio[1:], atol=1e-5, rtol=0)


def test_gradient_is_the_share_of_the_teacher_in_the_mix():
    # d/dx log(a e^x + 1 - a) = a e^x / (a e^x + 1 - a) = sigmoid(x + log(a / (1 - a)))
    log_ratio = torch.tensor([-math.inf, -50.0, -1.0, 0.0, 2.0, 50.0], dtype=torch.float64, requires_grad=True)
    proximal_reward(log_ratio, alpha=0.2).sum().backward()
    expected = torch.sigmoid(log_ratio.detach() + math.log(0.2 / 0.8))
    torch.testing.assert_close(log_ratio.grad, expected)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0001, math.nan], ids=str)
def test_alpha_outside_its_range_is_an_error(alpha):
    with pytest.raises(ValueError, match="alpha must be in"):
        proximal_reward(torch.zeros(2), alpha=alpha)
    with pytest.raises(ValueError, match="alpha must be in"):
        topd.topd_advantages(TEACHER, STUDENT, alpha=alpha)


def test_clipped_reward_clamps_and_stops_the_gradient_there():
    log_ratio = torch.tensor([-math.inf, -6.0, -2.0, 0.0, 2.0, 60.0], requires_grad=True)
    rewards = clipped_reward(log_ratio, low=-5.0, high=3.0)
    assert rewards.tolist() == [-5.0, -5.0, -2.0, 0.0, 2.0, 3.0]
    rewards.sum().backward()
    assert log_ratio.grad.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_floor_reward_is_bounded_below_only():
    log_ratio = torch.tensor([-math.inf, -6.0, -5.0, 0.0, 60.0], requires_grad=True)
    rewards = floor_reward(log_ratio, floor=-5.0)
    assert rewards.tolist() == [-5.0, -5.0, -5.0, 0.0, 60.0]
    rewards.sum().backward()
    assert log_ratio.grad[[0, 1, 3, 4]].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("student", "teacher", "exponent", "expected"),
    [
        (0.5, 0.25, 1.0, -0.25),  # 0.25 - 0.5
        (0.25, 0.5, 1.0, 0.25),
        (0.25, 1.0, 0.5, 0.5),  # sqrt(1) - sqrt(0.25)
        (0.5, 0.25, 2.0, -0.1875),  # 0.0625 - 0.25
        (0.5, 0.0, 1.0, -0.5),
        (0.3, 0.3, 3.0, 0.0),
    ],
)
def test_power_reward_literals(student, teacher, exponent, expected):
    behaviour = torch.tensor([student]).log()
    log_ratio = torch.tensor([teacher]).log() - behaviour
    assert power_reward(log_ratio, behaviour, exponent=exponent).item() == pytest.approx(expected, abs=1e-6)


@given(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32) | st.just(-math.inf), st.floats(0.1, 3))
def test_power_reward_is_bounded(student, teacher, exponent):
    behaviour = torch.tensor([student])
    reward = power_reward(torch.tensor([teacher]) - behaviour, behaviour, exponent=exponent).item()
    assert -1.00001 <= reward <= 1.00001


# --- topd.topd_advantages: the public form of the same mathematics


def test_public_function_is_finite_where_the_teacher_rejects_a_token():
    teacher = [torch.tensor([-math.inf, -0.1]), torch.tensor([-0.5])]
    student = [torch.tensor([-0.3, -0.1]), torch.tensor([-0.7])]
    assert torch.isfinite(torch.cat(topd.topd_advantages(teacher, student))).all()


def test_public_function_detaches():
    student = [part.clone().requires_grad_() for part in STUDENT]
    assert not any(part.requires_grad for part in topd.topd_advantages(TEACHER, student))


def test_public_function_agrees_with_the_algorithm_default():
    assert algorithm.Config().alpha == 0.2
    by_default = topd.topd_advantages(TEACHER, STUDENT)
    assert torch.equal(torch.cat(by_default), torch.cat(topd.topd_advantages(TEACHER, STUDENT, alpha=0.2)))


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        ([], [], "at least 2 completions"),
        ([torch.zeros(2)], [torch.zeros(2)], "at least 2 completions"),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(1)], "one teacher tensor per completion"),
        ([torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(1)], "completion 1"),
        ([torch.zeros(2), torch.zeros(0)], [torch.zeros(2), torch.zeros(0)], "completion 1"),
        ([torch.zeros(1, 2), torch.zeros(2)], [torch.zeros(1, 2), torch.zeros(2)], "completion 0"),
        ([torch.zeros(2, dtype=torch.long), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)], "must be floats"),
    ],
    ids=["empty", "one", "count", "length", "no tokens", "2-D", "integers"],
)
def test_public_function_rejects(teacher, student, message):
    with pytest.raises(ValueError, match=message):
        topd.topd_advantages(teacher, student)


def test_reward_is_exactly_zero_where_teacher_and_student_agree():
    for alpha in (0.1, 0.2, 0.3, 0.5, 0.9, 1.0):
        assert proximal_reward(torch.zeros(3), alpha=alpha).tolist() == [0.0, 0.0, 0.0]


def test_rounding_is_agreement_and_nothing_else_is():
    log_ratio = torch.tensor([0.0, 2e-5, -9e-5, 2e-4, -2e-4, float("-inf")])
    assert without_rounding(log_ratio).tolist() == [0.0, 0.0, 0.0, *log_ratio[3:].tolist()]


def test_groups_within_rounding_agree_and_no_others():
    """Root mean squares: 0.3 (not the mean, 0), then 5 / sqrt(2) by a single token, infinity, 0."""
    log_ratio = torch.tensor([0.3, -0.3, 0.3, 0.0, -5.0, float("-inf"), 0.0, 0.0])
    counts = torch.tensor([3, 2, 2, 1])
    assert in_agreement(log_ratio, counts, rounding=0.30001).tolist() == [True] * 3 + [False] * 4 + [True]
    assert in_agreement(log_ratio, counts, rounding=0.29999).tolist() == [False] * 7 + [True]
    assert in_agreement(log_ratio, counts, rounding=3.54).tolist() == [True] * 5 + [False] * 2 + [True]
    assert in_agreement(log_ratio, counts, rounding=0.0).tolist() == [False] * 7 + [True]
