import dataclasses

import pytest
import torch

from tests.fakes import scored_groups
from topd.algorithms import grpo
from topd.ops.weighting import rollout_mean
from topd.trainer.batch import flatten


def graded(*grades, shapes):
    return dataclasses.replace(flatten(scored_groups(*shapes)), tokens={}, rollouts={"grades": torch.tensor(grades)})


def test_literal():
    # grades 1, 0, 0, 0: mean 0.25, unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25: 0.75 / 0.5 and -0.25 / 0.5
    data = graded(1.0, 0.0, 0.0, 0.0, shapes=[(2, 1, 3, 1)])
    credit = grpo.credit(data, grpo.Config())
    assert credit.advantages.tolist() == pytest.approx([1.5, 1.5, -0.5, -0.5, -0.5, -0.5, -0.5])
    assert credit.token_rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("grade", [0.0, 1.0, 0.3])
def test_a_group_of_equal_grades_gives_zero_credit(grade):
    credit = grpo.credit(graded(*[grade] * 5, shapes=[(2, 1, 3), (1, 4)]), grpo.Config())
    assert credit.advantages.tolist() == [0.0] * 11


def test_only_its_own_group_is_the_baseline():
    credit = grpo.credit(graded(1.0, 0.0, 1.0, 1.0, shapes=[(1, 1), (2, 1)]), grpo.Config())
    assert credit.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0, 0.0])


def test_needs_no_teacher_and_two_completions():
    assert frozenset({"answers"}) == grpo.NEEDS
    assert grpo.Config().min_group_size == 2
    assert grpo.WEIGHTING is rollout_mean
