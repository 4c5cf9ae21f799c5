"""Mini-batches of whole groups, every group once per epoch, weights that sum to 1."""

import dataclasses

import pytest
import torch

from tests.fakes import evidence
from topd.ops.weighting import group_token_mean
from topd.trainer.batch import flatten, make_batches
from topd.types import Credit, Prompt, Rollout, RolloutGroup, ScoredGroup


def scored(number: int) -> ScoredGroup:
    """Group `number`: two completions of number + 1 and one tokens, all of whose tokens are `number`."""
    parts = (torch.full((number + 1,), -float(number)), torch.full((1,), -0.5))
    rollouts = tuple(Rollout(token_ids=(number,) * len(p), logprobs=p, finish_reason="stop", text="") for p in parts)
    return ScoredGroup(
        group=RolloutGroup(prompt=Prompt(id=f"train/{number}", text="", token_ids=(9,)), rollouts=rollouts, policy_version=0),
        evidence=evidence(torch.tensor([1.0, 0.0]), behaviour=parts, old=parts),
    )


GROUPS = [scored(number) for number in range(4)]
NUM_TOKENS = sum(number + 2 for number in range(4))
ZEROS = torch.zeros(NUM_TOKENS)
CREDIT = Credit(advantages=torch.arange(float(NUM_TOKENS)), token_rewards=ZEROS, returns=ZEROS)


def batches(**changes: object):
    options = {"weighting": group_token_mean, "minibatch_prompts": 2, "epochs": 1, "seed": (0, "minibatches", 1), **changes}
    return make_batches(GROUPS, flatten(GROUPS), CREDIT, **options)


def test_flat_streams_keep_the_order() -> None:
    flat = flatten(GROUPS)
    assert flat.lengths.tolist() == [1, 1, 2, 1, 3, 1, 4, 1]
    assert flat.group_sizes.tolist() == [2, 2, 2, 2]
    assert flat["behaviour_logprobs"][:5].tolist() == [0.0, -0.5, -1.0, -1.0, -0.5]
    assert "teacher_logprobs" not in flat


def test_credit_sees_the_behaviour_and_the_ratio_the_old_log_probs() -> None:
    """They differ where sampling is less precise than training."""
    old = GROUPS[1].evidence["old_logprobs"]
    moved = GROUPS[1].evidence.adding(behaviour_logprobs=old - 10, teacher_logprobs=old - 20)
    group = dataclasses.replace(GROUPS[1], evidence=moved)
    flat = flatten([group])
    assert flat["behaviour_logprobs"].tolist() == [-11.0, -11.0, -10.5]
    assert flat["teacher_logprobs"].tolist() == [-21.0, -21.0, -20.5]
    assert "teacher_logprobs" not in flatten([group, GROUPS[2]])
    credit = Credit(advantages=torch.tensor([1.0, 2.0, 3.0]), token_rewards=torch.zeros(3), returns=torch.ones(3))
    [batch] = make_batches([group], flat, credit, weighting=group_token_mean, minibatch_prompts=1, epochs=1, seed=(0,))
    assert batch.streams["old_logprobs"].tolist() == [-1.0, -1.0, -0.5]
    assert batch.streams["advantages"].tolist() == [1.0, 2.0, 3.0]


def test_every_group_once_per_epoch_in_a_new_order() -> None:
    ids = [[group.prompt.id for group in batch.groups] for batch in batches(epochs=2)]
    assert len(ids) == 4
    assert all(len(batch) == 2 for batch in ids)
    first, second = ids[0] + ids[1], ids[2] + ids[3]
    assert sorted(first) == sorted(second) == [f"train/{number}" for number in range(4)]
    assert batches()[0].groups[0].prompt.id == first[0]


def test_streams_stay_with_their_tokens() -> None:
    starts = {"train/0": 0.0, "train/1": 2.0, "train/2": 5.0, "train/3": 9.0}
    for batch in batches():
        streams = zip(batch.groups, batch.streams.by_group("advantages"), batch.streams.by_group("old_logprobs"), strict=True)
        for group, advantages, old in streams:
            number = int(group.prompt.id[-1])
            assert advantages.tolist() == [starts[group.prompt.id] + i for i in range(number + 2)]
            assert old.tolist() == [-float(number)] * (number + 1) + [-0.5]
            assert group.completions == ((number,) * (number + 1), (number,))


@pytest.mark.parametrize("minibatch_prompts", [1, 2, 4])
def test_weights_sum_to_one_and_groups_weigh_the_same(minibatch_prompts: int) -> None:
    for batch in batches(minibatch_prompts=minibatch_prompts):
        assert float(batch.streams["weights"].sum()) == pytest.approx(1, abs=1e-6)
        shares = batch.streams.by_group("weights")
        assert all(float(share.sum()) == pytest.approx(1 / minibatch_prompts, abs=1e-6) for share in shares)


def test_after_dropped_groups_mini_batches_are_as_equal_as_can_be() -> None:
    """Of five groups in batches of at most four: three and two, not four and one, which would weigh as much as the four."""
    groups = [scored(number) for number in range(5)]
    tokens = sum(number + 2 for number in range(5))
    zeros = torch.zeros(tokens)
    credit = Credit(advantages=zeros, token_rewards=zeros, returns=zeros)
    made = make_batches(
        groups, flatten(groups), credit, weighting=group_token_mean, minibatch_prompts=4, epochs=1, seed=(0, "minibatches", 1)
    )
    assert [len(batch.groups) for batch in made] == [3, 2]


def test_every_epoch_has_its_own_order() -> None:
    made = batches(epochs=5, minibatch_prompts=1)
    orders = {tuple(batch.groups[0].prompt.id for batch in made[start : start + 4]) for start in range(0, 20, 4)}
    assert len(orders) > 2
