import dataclasses
import itertools
import math
from typing import get_args

import pytest
import torch

from tests.fakes import credit_input, scored_groups
from topd.algorithms import opd, topd
from topd.trainer.batch import flatten, make_batches
from topd.types import Forward

GROUP = [[-0.5, -1.0, -0.2], [-0.4, -0.1]]
TAUGHT = [[-0.3, -2.0, -0.2], [-0.1, -0.6]]


def choices(key):
    return get_args(topd.Config.model_fields[key].annotation)


def batch(*shapes, seed=0):
    return flatten(scored_groups(*shapes, seed=seed))


def test_vector_of_two_groups():
    """The known group twice, the second time with student and teacher shifted alike: the same advantages in both."""
    shifted = [[[x - 3 for x in completion] for completion in side] for side in (GROUP, TAUGHT)]
    credit = topd.credit(credit_input([GROUP, shifted[0]], [TAUGHT, shifted[1]]), topd.Config())
    expected = torch.tensor([0.4772, -1.4909, 0.9075, 0.6532, -0.5469] * 2)
    torch.testing.assert_close(credit.advantages, expected, atol=1e-4, rtol=0)
    rewards = torch.tensor([0.043328, -0.135160, 0.000000, 0.067632, -0.081963] * 2)
    torch.testing.assert_close(credit.token_rewards, rewards, atol=2e-6, rtol=0)


def test_defaults_are_the_papers():
    config = topd.Config()
    assert (config.alpha, config.clip, config.std_floor) == (0.2, 0.2, 1e-6)
    assert (config.reward, config.returns, config.normalize) == ("proximal", "mean_of_future", "group_tokens")


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.9, 1.0])
def test_student_equal_to_teacher_gives_zero_reward_and_advantage(alpha):
    credit = topd.credit(credit_input([GROUP, [[-1.0], [-2.0]]], [GROUP, [[-1.0], [-2.0]]]), topd.Config(alpha=alpha))
    torch.testing.assert_close(credit.token_rewards, torch.zeros(7), atol=1e-7, rtol=0)
    if alpha in (0.2, 1.0):
        assert credit.advantages.abs().max() < 0.2  # rounding of log(alpha + 1 - alpha) over the floor of 1e-6 at most


def test_student_equal_to_teacher_gives_exactly_zero_advantage_for_the_plain_log_ratio():
    credit = topd.credit(credit_input([GROUP], [GROUP]), topd.Config(reward="log_ratio"))
    assert credit.token_rewards.tolist() == credit.advantages.tolist() == [0.0] * 5


@pytest.mark.parametrize("returns", ["mean_of_future", "immediate", "discounted"])
def test_return_of_the_last_token_is_its_reward(returns):
    lengths = torch.tensor([3, 1, 4])
    rewards = torch.tensor([0.5, -1.0, 2.0, 7.0, 0.1, 0.2, 0.3, 0.4])
    found = topd.token_returns(rewards, lengths, topd.Config(returns=returns))
    last = lengths.cumsum(0) - 1
    assert found[last].tolist() == pytest.approx(rewards[last].tolist())


@pytest.mark.parametrize("returns", ["mean_of_future", "immediate", "discounted"])
def test_one_token_completions_have_no_future(returns):
    one_token = batch((1, 1, 1), (1, 1))
    config = topd.Config(returns=returns, normalize="none")
    credit = topd.credit(one_token, config)
    torch.testing.assert_close(credit.advantages, credit.token_rewards, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("reward", "returns", "normalize"),
    list(itertools.product(choices("reward"), choices("returns"), choices("normalize"))),
    ids="-".join,
)
def test_every_combination_of_keys_runs_and_is_finite(reward, returns, normalize):
    config = topd.Config(reward=reward, returns=returns, normalize=normalize)
    for data in (batch((3, 5, 1), (1, 4), (6, 2)), batch((1, 1)), batch((1,))):
        credit = topd.credit(data, config)
        assert credit.advantages.shape == credit.token_rewards.shape == data["behaviour_logprobs"].shape
        assert torch.isfinite(credit.advantages).all()
        if normalize == "none" and returns == "immediate":
            assert torch.equal(credit.advantages, credit.token_rewards)


@pytest.mark.parametrize("returns", choices("returns"))
@pytest.mark.parametrize("reward", ["proximal", "clipped", "power", "floor"])
def test_bounded_rewards_are_finite_where_the_teacher_rejects_a_token(reward, returns):
    data = credit_input([GROUP], [[[-0.3, -math.inf, -0.2], [-0.1, -0.6]]])
    credit = topd.credit(data, topd.Config(reward=reward, returns=returns))
    assert torch.isfinite(credit.token_rewards).all()
    assert torch.isfinite(credit.advantages).all()
    assert int(credit.advantages.argmin()) in (0, 1)  # the rejected token, or the one before it that led there


def test_proximal_reward_is_never_below_its_bound():
    data = credit_input([[[-0.1] * 4, [-0.1]]], [[[-1.0, -20.0, -1e4, -math.inf], [-0.1]]])
    for alpha in (0.1, 0.2, 0.5):
        rewards = topd.credit(data, topd.Config(alpha=alpha)).token_rewards
        assert rewards.min().item() == pytest.approx(math.log(1 - alpha), abs=1e-6)


def test_alpha_one_is_the_log_ratio():
    data = batch((3, 5), (1, 4))
    one, other = topd.credit(data, topd.Config(alpha=1.0)), topd.credit(data, topd.Config(reward="log_ratio"))
    assert torch.equal(one.token_rewards, other.token_rewards)
    assert torch.equal(one.advantages, other.advantages)


def test_plain_log_ratio_without_returns_and_normalisation_is_opd():
    data = batch((3, 5), (1, 4), (6, 2))
    config = topd.Config(reward="log_ratio", returns="immediate", normalize="none")
    mine, theirs = topd.credit(data, config), opd.credit(data, opd.Config())
    assert torch.equal(mine.advantages, theirs.advantages)
    assert torch.equal(mine.token_rewards, theirs.token_rewards)


def test_credit_is_made_of_log_probs_alone():
    """No outcome reward: other grades give the same credit."""
    data = batch((3, 5), (1, 4))
    graded = dataclasses.replace(data, rollouts={"grades": data["grades"] + torch.tensor([1.0, -2.0, 3.0, 0.5])})
    assert torch.equal(topd.credit(data, topd.Config()).advantages, topd.credit(graded, topd.Config()).advantages)


def test_the_objective_is_the_clipped_surrogate_and_nothing_else():
    """No KL, reference or entropy term: with an advantage of 0 nothing is left, wherever the policy is."""
    data = scored_groups((3, 5), (1, 4))
    for scale in (0.0, 1.0):
        credit = topd.credit(flatten(data), topd.Config())
        credit = dataclasses.replace(credit, advantages=scale * credit.advantages)
        options = {"weighting": topd.WEIGHTING, "minibatch_prompts": 2, "epochs": 1, "seed": (0,)}
        [trained] = make_batches(data, flatten(data), credit, **options)
        old, advantages = trained.streams["old_logprobs"], trained.streams["advantages"]
        moved = old + torch.linspace(-0.5, 0.5, len(old))
        loss, _ = topd.objective(Forward(logprobs=moved), trained.streams, topd.Config())
        pairs = zip(moved.tolist(), old.tolist(), advantages.tolist(), strict=True)
        expected = [-min(math.exp(new - old) * a, min(max(math.exp(new - old), 0.8), 1.2) * a) for new, old, a in pairs]
        assert loss.tolist() == pytest.approx(expected, abs=1e-5)


# --- normalisation


def test_group_tokens_standardise_every_group():
    data = batch((3, 5), (1, 4), (6, 2))
    advantages = topd.credit(data, topd.Config()).advantages
    for part in advantages.double().split([8, 5, 8]):
        assert part.mean().item() == pytest.approx(0, abs=1e-6)
        assert part.std().item() == pytest.approx(1, abs=1e-6)


def test_batch_tokens_standardise_the_whole_batch():
    advantages = topd.credit(batch((3, 5), (1, 4), (6, 2)), topd.Config(normalize="batch_tokens")).advantages.double()
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, abs=1e-6)


def test_group_rollouts_give_one_number_a_completion():
    # log-ratios, immediate: means of the completions 1 and 3 -> mean 2, unbiased std sqrt(2): -0.7071 and 0.7071
    data = credit_input([[[0.0, 0.0], [0.0]]], [[[0.0, 2.0], [3.0]]])
    config = topd.Config(reward="log_ratio", returns="immediate", normalize="group_rollouts")
    expected = [-(0.5**0.5), -(0.5**0.5), 0.5**0.5]
    assert topd.credit(data, config).advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("normalize", "smallest"), [("group_tokens", 2), ("group_rollouts", 2), ("batch_tokens", 1), ("none", 1)]
)
def test_min_group_size(normalize, smallest):
    assert topd.Config(normalize=normalize).min_group_size == smallest


# --- rounding


@pytest.mark.parametrize("normalize", choices("normalize"))
@pytest.mark.parametrize("reward", choices("reward"))
def test_a_group_of_rounding_gets_nothing_and_the_others_what_they_get_alone(reward, normalize):
    noise = [[x + d for x, d in zip(row, (0.02, -0.03, 0.01), strict=False)] for row in GROUP]
    config = topd.Config(reward=reward, normalize=normalize, rounding=0.03)
    credit = topd.credit(credit_input([GROUP, GROUP], [noise, TAUGHT]), config)
    for stream in (credit.token_rewards, credit.returns):
        assert stream[:5].tolist() == [0.0] * 5
        assert stream[5:].abs().max() > 0.05
    if normalize != "batch_tokens":  # there the mean over the batch is taken off
        assert credit.advantages[:5].tolist() == [0.0] * 5
        alone = topd.credit(credit_input([GROUP], [TAUGHT]), config).advantages
        assert torch.equal(credit.advantages[5:], alone)


def test_without_that_rule_normalisation_makes_rounding_as_large_as_any_signal():
    noise = [[x + d for x, d in zip(row, (0.02, -0.03, 0.01), strict=False)] for row in GROUP]
    for rounding in (0.0, None):
        advantages = topd.credit(credit_input([GROUP], [noise]), topd.Config(rounding=rounding)).advantages
        assert advantages.std().item() == pytest.approx(1, abs=1e-5)


def test_unset_rounding_is_that_of_the_precision_and_a_given_one_stays():
    assert topd.Config().in_precision("float32").rounding == 1e-4
    assert topd.Config().in_precision("bfloat16").rounding == 0.1
    assert topd.Config(rounding=0.02).in_precision("bfloat16").rounding == 0.02
    assert topd.Config(alpha=0.3).in_precision("bfloat16").alpha == 0.3


# --- keys act


def test_bound_power_and_discount_act():
    data = credit_input([[[-1.0, -1.0], [-1.0]]], [[[-9.0, -1.0], [-0.5]]])
    plain = dict(returns="immediate", normalize="none")
    clipped = topd.credit(data, topd.Config(reward="clipped", reward_bound=0.25, **plain)).advantages
    assert clipped.tolist() == pytest.approx([-0.25, 0.0, 0.25])
    floored = topd.credit(data, topd.Config(reward="floor", reward_bound=0.25, **plain)).advantages
    assert floored.tolist() == pytest.approx([-0.25, 0.0, 0.5])
    power = topd.credit(data, topd.Config(reward="power", reward_power=2.0, **plain)).advantages
    # exp(-18) - exp(-2), 0, exp(-1) - exp(-2)
    assert power.tolist() == pytest.approx([math.exp(-18) - math.exp(-2), 0.0, math.exp(-1) - math.exp(-2)], abs=1e-6)
    config = topd.Config(reward="log_ratio", returns="discounted", discount=0.5, normalize="none")
    assert topd.credit(data, config).advantages.tolist() == pytest.approx([-8.0, 0.0, 0.5])


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"alpha": 1.1},
        {"clip": 0.0},
        {"clip": 1.0},
        {"std_floor": 0.0},
        {"rounding": -0.1},
        {"discount": 1.1},
        {"reward": "mean"},
    ],
    ids=str,
)
def test_values_outside_their_range_are_errors(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        topd.Config(**wrong)
