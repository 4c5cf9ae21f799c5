import torch

from tests.fakes import credit_input, scored_groups
from topd.algorithms import opd
from topd.ops.weighting import token_mean
from topd.trainer.batch import flatten


def test_advantage_is_the_log_ratio():
    # -0.3 + 0.5, -2 + 1, 0 | -0.1 + 0.4
    credit = opd.credit(credit_input([[[-0.5, -1.0, -0.2], [-0.4]]], [[[-0.3, -2.0, -0.2], [-0.1]]]), opd.Config())
    torch.testing.assert_close(credit.advantages, torch.tensor([0.2, -1.0, 0.0, 0.3]))
    assert torch.equal(credit.advantages, credit.token_rewards)


def test_student_equal_to_teacher_gives_zero():
    same = [[[-0.5, -1.0], [-0.4]]]
    assert opd.credit(credit_input(same, same), opd.Config()).advantages.tolist() == [0.0, 0.0, 0.0]


def test_a_completion_needs_no_company():
    assert opd.Config().min_group_size == 1
    data = flatten(scored_groups((4,), (1,)))
    assert torch.equal(opd.credit(data, opd.Config()).advantages, data["teacher_logprobs"] - data["behaviour_logprobs"])


def test_every_token_counts_the_same():
    assert opd.WEIGHTING is token_mean
    assert frozenset({"teacher_logprobs"}) == opd.NEEDS
