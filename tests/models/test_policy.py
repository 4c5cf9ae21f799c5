"""The owner of the weights that train."""

import re
from pathlib import Path

import pytest
import torch

import topd
from tests.fakes import make_model, ragged_groups
from topd.config import TrainerConfig
from topd.models.logprobs import completion_logprobs
from topd.models.policy import Policy, frozen_copy

GROUPS = ragged_groups((3, (5, 2)), (4, (1,)))
CORE = [path for path in Path(topd.__file__).parent.rglob("*.py") if not {"report", "serve", "trackers"} & set(path.parts)]


def updated(policy: Policy, updates: int = 2) -> Policy:
    """The policy after some updates towards its own samples."""
    for _ in range(updates):
        policy.zero_grad()
        (-policy(GROUPS, temperature=1.0).logprobs.mean()).backward()
        policy.clip_gradients(1.0)
        policy.step(1e-2)
    return policy


def test_one_module_of_the_core_reads_and_writes_weights() -> None:
    touching = re.compile(r"(?<!\w)(named_)?parameters\(\)|state_dict\(\)|optimizer\.state\b")
    assert {path.name for path in CORE if touching.search(path.read_text())} == {"policy.py"}


def test_its_forward_pass_is_that_of_the_model_and_its_hooks_fire() -> None:
    policy, called = Policy(make_model()), []
    policy.register_forward_pre_hook(lambda *_: called.append("before"))
    policy.register_forward_hook(lambda *_: called.append("after"))
    logprobs = policy(GROUPS, temperature=0.7).logprobs
    assert called == ["before", "after"]
    assert torch.equal(logprobs, completion_logprobs(policy.model, GROUPS, temperature=0.7))
    assert logprobs.requires_grad


def test_what_was_saved_and_restored_makes_the_same_next_update() -> None:
    policy, other = updated(Policy(make_model())), Policy(make_model(seed=1))
    other.restore(policy.saved_weights())
    other.restore_optimizer({name: tensor.clone() for name, tensor in policy.saved_optimizer().items()})
    assert policy.version == 2
    for one in (policy, other):
        updated(one, 1)
    assert all(torch.equal(weight, other.trainable()[name]) for name, weight in policy.trainable().items())


def test_a_missing_weight_changes_none() -> None:
    policy, before = Policy(make_model()), make_model()
    weights = {name: torch.zeros_like(weight) for name, weight in policy.saved_weights().items()}
    name, _ = weights.popitem()
    with pytest.raises(KeyError, match=re.escape(name)):
        policy.restore(weights)
    assert all(torch.equal(weight, before.module.get_parameter(name)) for name, weight in policy.trainable().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_follows_the_policy_and_trains_nothing(dtype: torch.dtype) -> None:
    policy = Policy(make_model())
    copied = frozen_copy(policy.model, dtype)
    updated(policy)
    before = [weight.clone() for weight in copied.module.parameters()]
    policy.copy_to(copied)
    pairs = list(zip(copied.module.parameters(), policy.module.parameters(), strict=True))
    assert all(torch.equal(theirs, ours.to(dtype)) for theirs, ours in pairs)
    assert not all(torch.equal(old, theirs) for old, (theirs, _) in zip(before, pairs, strict=True))
    assert not any(theirs.requires_grad for theirs, _ in pairs)


def test_weights_to_hand_over_hold_the_tied_head() -> None:
    policy = Policy(make_model("qwen3", tie_word_embeddings=True))
    weights = dict(policy.weights(torch.bfloat16))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in weights.values())


def test_weight_decay_is_for_matrices() -> None:
    policy = Policy(make_model(), TrainerConfig(weight_decay=0.5))
    decayed = {parameter.ndim: group["weight_decay"] for group in policy.optimizer.param_groups for parameter in group["params"]}
    assert decayed == {2: 0.5, 1: 0.0}


def test_moments_go_to_the_weights_device_and_the_count_of_steps_stays() -> None:
    """AdamW reads the count on the CPU; the meta device stands in for an accelerator."""
    policy = Policy(make_model())
    policy.module.to("meta")
    policy = Policy(policy.model)
    name, weight = next(iter(policy.trainable().items()))
    policy.restore_optimizer({f"{name}/step": torch.tensor(3.0), f"{name}/exp_avg": torch.ones(weight.shape)})
    state = policy.optimizer.state[weight]
    assert (state["step"].item(), state["exp_avg"].device.type) == (3.0, "meta")
