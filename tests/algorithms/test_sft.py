import torch

from tests.fakes import scored_groups
from topd.algorithms import sft
from topd.ops.weighting import token_mean
from topd.trainer.batch import flatten, make_batches
from topd.types import Forward


def test_every_demonstrated_token_is_wanted_equally():
    credit = sft.credit(flatten(scored_groups((3,), (1,))), sft.Config())
    assert credit.advantages.tolist() == [1.0] * 4
    assert credit.token_rewards.tolist() == [0.0] * 4


def test_weighted_loss_is_the_mean_cross_entropy():
    scored = scored_groups((3,), (1,))
    credit = sft.credit(flatten(scored), sft.Config())
    (batch,) = make_batches(scored, flatten(scored), credit, weighting=sft.WEIGHTING, minibatch_prompts=2, epochs=1, seed=(0,))
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -6.0], requires_grad=True)
    token_loss, clipped = sft.objective(Forward(logprobs=logprobs), batch.streams, sft.Config())
    loss = (batch.streams["weights"] * token_loss).sum()
    loss.backward()
    assert loss.item() == 3.0  # (1 + 2 + 3 + 6) / 4
    assert logprobs.grad.tolist() == [-0.25] * 4
    assert not clipped.any()


def test_needs_demonstrations_only():
    assert frozenset({"demonstrations"}) == sft.NEEDS
    assert sft.WEIGHTING is token_mean
    assert sft.Config().min_group_size == 1
