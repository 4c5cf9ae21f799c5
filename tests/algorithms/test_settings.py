"""`clip` and `std_floor` of every algorithm that has them are what its objective and credit use."""

import dataclasses

import pytest
import torch

from tests.fakes import credit_input, scored_groups
from topd import algorithms
from topd.ops.objective import PerToken
from topd.trainer.batch import flatten
from topd.types import TrainBatch, TrainGroup

RATIOS = torch.tensor([1.45, 0.65, 1.45, 0.65])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
"""The first two have moved in the wanted direction, the others against it."""


def loss_at(name: str, clip: float) -> tuple[PerToken, torch.Tensor]:
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    group = TrainGroup(
        prompt_id="train/0", prompt_ids=(3,), completions=((4, 5), (6, 7)), old_logprobs=old, advantages=SIGNS, weights=old
    )
    algorithm = algorithms.load(name)
    return algorithm.objective(old + RATIOS.log(), TrainBatch(groups=(group,)), algorithm.Config(clip=clip))


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
    data = dataclasses.replace(flatten(scored_groups((2, 1))), rewards=torch.tensor([1.0, 0.0]))
    grpo = algorithms.load("grpo")
    assert grpo.credit(data, grpo.Config(std_floor=5.0)).advantages.tolist() == pytest.approx([0.1, 0.1, -0.1])
