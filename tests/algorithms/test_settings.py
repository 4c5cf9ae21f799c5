"""`clip` and `std_floor` of every algorithm that has them are what its objective and credit use."""

import dataclasses

import pytest
import torch

from tests.fakes import credit_input, scored_groups
from topd import algorithms
from topd.ops.objective import PerToken
from topd.ops.weighting import group_token_mean
from topd.ragged import Ragged
from topd.trainer.batch import flatten
from topd.types import Forward

RATIOS = torch.tensor([1.45, 0.65, 1.45, 0.65])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
"""The first two have moved in the wanted direction, the others against it."""


def loss_at(name: str, clip: float) -> tuple[PerToken, torch.Tensor]:
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    streams = Ragged.of([((4, 5), (6, 7))]).adding(old_logprobs=old, advantages=SIGNS)
    algorithm = algorithms.load(name)
    return algorithm.objective(Forward(logprobs=old + RATIOS.log()), streams, algorithm.Config(clip=clip))


def having(key: str) -> list[str]:
    return [name for name in algorithms.available() if key in algorithms.load(name).Config.model_fields]


def test_those_that_have_them_are_known() -> None:
    assert {"topd", "opd", "grpo"} <= set(having("clip"))
    assert {"topd", "grpo"} <= set(having("std_floor"))


@pytest.mark.parametrize("name", having("clip"))
def test_the_ratio_is_clipped_at_the_set_bound_on_both_sides(name: str) -> None:
    wide, clipped = loss_at(name, 0.5)
    assert wide.tolist() == pytest.approx((-RATIOS * SIGNS).tolist())
    assert clipped.tolist() == [False] * 4
    narrow, clipped = loss_at(name, 0.1)
    assert narrow.tolist() == pytest.approx([-1.1, 0.9, 1.45, -0.65])
    assert clipped.tolist() == [True, True, False, False]
    above, clipped = loss_at(name, 0.4)  # 1.4 and 0.6: only the ratio of 1.45 is outside
    assert above.tolist() == pytest.approx([-1.4, 0.65, 1.45, -0.65])
    assert clipped.tolist() == [True, False, False, False]


@pytest.mark.parametrize("normalize", ["group_tokens", "group_rollouts", "batch_tokens"])
def test_topd_divides_by_no_less_than_the_set_floor(normalize: str) -> None:
    # log-ratios 1, -1, 3: their mean is 1, the completions' means are 0 and 3
    data = credit_input([[[-1.0, -1.0], [-4.0]]], [[[0.0, -2.0], [-1.0]]])
    topd = algorithms.load("topd")
    config = topd.Config(reward="log_ratio", returns="immediate", normalize=normalize, std_floor=10.0)
    expected = [-0.15, -0.15, 0.15] if normalize == "group_rollouts" else [0.0, -0.2, 0.2]
    assert topd.credit(data, config).advantages.tolist() == pytest.approx(expected)


def test_grpo_divides_by_no_less_than_the_set_floor() -> None:
    data = dataclasses.replace(flatten(scored_groups((2, 1))), rollouts={"grades": torch.tensor([1.0, 0.0])})
    grpo = algorithms.load("grpo")
    assert grpo.credit(data, grpo.Config(std_floor=5.0)).advantages.tolist() == pytest.approx([0.1, 0.1, -0.1])


def test_rewards_returns_and_advantages_are_each_in_their_own_field() -> None:
    # log-ratios 1, -1 and 3 of completions of two and one tokens; the first token's return is 1 - 1
    data = credit_input([[[-1.0, -1.0], [-4.0]]], [[[0.0, -2.0], [-1.0]]], [[1.0, 0.0]])
    topd = algorithms.load("topd")
    found = topd.credit(data, topd.Config(reward="log_ratio", normalize="none"))
    assert found.token_rewards.tolist() == pytest.approx([1.0, -1.0, 3.0])
    assert found.returns.tolist() == found.advantages.tolist() == pytest.approx([0.0, -1.0, 3.0])
    normalized = topd.credit(data, topd.Config(reward="log_ratio"))
    assert normalized.returns.tolist() == pytest.approx([0.0, -1.0, 3.0])
    assert normalized.advantages.tolist() != pytest.approx([0.0, -1.0, 3.0])
    grpo = algorithms.load("grpo")
    found = grpo.credit(data, grpo.Config())
    assert found.token_rewards.tolist() == found.returns.tolist() == [1.0, 1.0, 0.0]


def test_topd_weighs_groups_alike_and_completions_by_their_mean_return() -> None:
    # log-ratios 1 and 1; 3; 0: means 1, 3, 0 of mean 4/3 and unbiased std sqrt(7/3)
    assert algorithms.load("topd").WEIGHTING is group_token_mean
    data = credit_input([[[-2.0, -2.0], [-4.0], [-1.0]]], [[[-1.0, -1.0], [-1.0], [-1.0]]])
    topd = algorithms.load("topd")
    config = topd.Config(reward="log_ratio", returns="immediate", normalize="group_rollouts")
    expected = [(mean - 4 / 3) / (7 / 3) ** 0.5 for mean in (1, 1, 3, 0)]
    assert topd.credit(data, config).advantages.tolist() == pytest.approx(expected)


def test_a_difference_that_is_rounding_earns_nothing() -> None:
    data = credit_input([[[-1.0, -1.0], [-4.0]]], [[[-1.00005, -2.0], [-1.0]]])
    topd = algorithms.load("topd")
    for reward in ("proximal", "log_ratio"):
        assert topd.credit(data, topd.Config(reward=reward)).token_rewards.tolist()[0] == 0.0
