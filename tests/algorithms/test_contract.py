"""What every algorithm must satisfy. A new module is found by itself."""

import dataclasses
import inspect

import pytest
import torch
from pydantic import ValidationError

from tests.fakes import make_model, scored_groups
from topd import algorithms
from topd.algorithms.base import Algorithm, Method
from topd.config import AlgorithmConfig
from topd.errors import ConfigError
from topd.evidence import EVIDENCE, PROMPT_FIELDS
from topd.models.logprobs import completion_logprobs
from topd.models.policy import Policy
from topd.ragged import Ragged
from topd.trainer.batch import flatten, make_batches
from topd.trainer.loss import micro_loss
from topd.types import Forward

SHAPES = ((3, 5), (1, 4), (6, 2), (2, 2))


@pytest.fixture(params=algorithms.available())
def name(request):
    return request.param


@pytest.fixture
def algorithm(name):
    return algorithms.load(name)


@pytest.fixture
def config(algorithm):
    return algorithm.Config()


def train_batch(algorithm, config, scored=None, seed=0):
    """All groups as one mini-batch, as the trainer gets it."""
    scored = scored or scored_groups(*SHAPES, seed=seed)
    flat = flatten(scored)
    credit = algorithm.credit(flat, config)
    (batch,) = make_batches(
        scored, flat, credit, weighting=algorithm.WEIGHTING, minibatch_prompts=len(scored), epochs=1, seed=(0, "minibatches", 1)
    )
    return batch


def tensors_of(noun):
    """Of a Credit, or the streams of a Ragged."""
    fields = {f.name: getattr(noun, f.name) for f in dataclasses.fields(noun)}
    streams = {**fields.get("tokens", {}), **fields.get("rollouts", {})}
    return streams | {name: value for name, value in fields.items() if torch.is_tensor(value)}


def moved(batch, seed=1, scale=0.5):
    """Log-probs of a policy that has moved away from the old one, so that some tokens are clipped."""
    generator = torch.Generator().manual_seed(seed)
    return batch["old_logprobs"] + scale * torch.randn(batch.num_tokens, generator=generator)


# --- the protocol


def test_module_satisfies_the_protocol(name, algorithm):
    assert isinstance(algorithm, Algorithm)
    assert isinstance(algorithm.NEEDS, frozenset)
    assert EVIDENCE.keys() | PROMPT_FIELDS.keys() >= algorithm.NEEDS
    assert list(inspect.signature(algorithm.credit).parameters) == ["evidence", "config"]
    assert list(inspect.signature(algorithm.objective).parameters) == ["forward", "batch", "config"]
    assert algorithm.__doc__


def test_config_is_closed_frozen_and_named_like_the_module(name, algorithm):
    assert issubclass(algorithm.Config, AlgorithmConfig)
    config = algorithm.Config()  # every key has its vetted default
    assert config.type == name
    assert config.min_group_size >= 1
    with pytest.raises(ValidationError, match="frozen"):
        config.type = "other"
    with pytest.raises(ValidationError, match="extra"):
        algorithm.Config(no_such_key=1)
    with pytest.raises(ValidationError, match="literal"):
        algorithm.Config(type="no_such_algorithm")
    assert algorithm.Config.model_validate(config.model_dump()) == config


def test_every_key_says_what_it_does(algorithm):
    fields = {key: field for key, field in algorithm.Config.model_fields.items() if key != "type"}
    assert all(field.description for field in fields.values())


def test_unknown_names_are_errors_that_suggest_the_nearest():
    with pytest.raises(ConfigError, match=r"found 'top_d'\. Did you mean 'topd'\?"):
        algorithms.load("top_d")
    for not_one in ("base", "", "os", "../topd", "topd."):
        with pytest.raises(ConfigError, match="must be one of"):
            algorithms.load(not_one)


# --- purity and shapes


def test_credit_is_pure_and_has_the_shape_of_the_tokens(algorithm, config):
    batch = flatten(scored_groups(*SHAPES))
    before = {key: value.clone() for key, value in tensors_of(batch).items()}
    state = torch.get_rng_state()
    one, two = algorithm.credit(batch, config), algorithm.credit(batch, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensors_of(batch)[key], value) for key, value in before.items())
    num_tokens = int(batch.lengths.sum())
    for key, value in tensors_of(one).items():
        assert value.shape == (num_tokens,)
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all()
        assert torch.equal(value, tensors_of(two)[key])


def test_objective_is_pure_unreduced_and_names_what_is_clipped(algorithm, config):
    batch = train_batch(algorithm, config).streams
    logprobs = moved(batch)
    before = logprobs.clone()
    copies = {key: value.clone() for key, value in tensors_of(batch).items()}
    state = torch.get_rng_state()
    (loss, clipped), (again, clipped_again) = (algorithm.objective(Forward(logprobs=logprobs), batch, config) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logprobs, before)
    assert all(torch.equal(tensors_of(batch)[key], value) for key, value in copies.items())
    assert loss.shape == clipped.shape == logprobs.shape
    assert clipped.dtype == torch.bool
    assert torch.isfinite(loss).all()
    assert torch.equal(loss, again)
    assert torch.equal(clipped, clipped_again)


def test_gradient_flows_through_logprobs_only_and_not_where_clipped(algorithm, config):
    batch = train_batch(algorithm, config).streams
    for stream in batch.tokens.values():
        stream.requires_grad_()
    logprobs = moved(batch).detach().requires_grad_()
    loss, clipped = algorithm.objective(Forward(logprobs=logprobs), batch, config)
    loss.sum().backward()
    assert all(stream.grad is None for stream in batch.tokens.values())
    assert not clipped.requires_grad
    has_gradient = logprobs.grad != 0
    assert not has_gradient[clipped].any()
    assert has_gradient[~clipped & (batch["advantages"] != 0)].all()


def test_a_tokens_loss_moves_no_other_token(algorithm, config):
    batch = train_batch(algorithm, config).streams
    logprobs = batch["old_logprobs"].clone().requires_grad_()
    loss, _ = algorithm.objective(Forward(logprobs=logprobs), batch, config)
    picked = int(batch["advantages"].abs().argmax())
    loss[picked].backward()
    assert logprobs.grad.nonzero().squeeze(-1).tolist() == [picked]


def test_objective_is_finite_far_from_the_old_policy(algorithm, config):
    batch = train_batch(algorithm, config).streams
    for shift in (-50.0, 50.0):
        loss, _ = algorithm.objective(Forward(logprobs=batch["old_logprobs"] + shift), batch, config)
        assert torch.isfinite(loss).all()


def test_first_update_has_ratio_exactly_one(algorithm, config):
    if "demonstrations" in algorithm.NEEDS:
        pytest.skip("nothing was sampled: there is no ratio")
    batch = train_batch(algorithm, config).streams
    logprobs = batch["old_logprobs"].clone().requires_grad_()
    loss, clipped = algorithm.objective(Forward(logprobs=logprobs), batch, config)
    loss.sum().backward()
    assert not clipped.any()
    assert torch.equal(loss.detach(), -batch["advantages"])
    assert torch.equal(logprobs.grad, -batch["advantages"])


# --- order


def nested(values, batch):
    """Flat token values -> [group][completion]."""
    parts = iter(values.split(batch.lengths.tolist()))
    return [[next(parts) for _ in range(size)] for size in batch.group_sizes.tolist()]


def permuted(batch: Ragged, groups: list[int], rows: list[int]) -> Ragged:
    """Groups in another order, and the completions of every group (all of one size) in another order."""

    def flat(values):
        return torch.cat([nested(values, batch)[g][r] for g in groups for r in rows])

    per_rollout = torch.stack([batch.lengths.float(), batch["grades"]], dim=-1).reshape(len(batch.group_sizes), len(rows), 2)
    per_rollout = per_rollout[groups][:, rows].reshape(-1, 2)
    return Ragged(
        lengths=per_rollout[:, 0].long(),
        group_sizes=batch.group_sizes[groups],
        tokens={name: flat(stream) for name, stream in batch.tokens.items()},
        rollouts={"grades": per_rollout[:, 1]},
    )


def test_order_of_groups_and_completions_does_not_matter(algorithm, config):
    batch = flatten(scored_groups((3, 5, 1), (1, 4, 4), (6, 2, 3), (2, 2, 7)))
    groups, rows = [2, 0, 3, 1], [1, 2, 0]
    shuffled = permuted(batch, groups, rows)
    before, after = algorithm.credit(batch, config), algorithm.credit(shuffled, config)
    for key in ("advantages", "token_rewards"):
        expected = nested(getattr(before, key), batch)
        expected = torch.cat([expected[g][r] for g in groups for r in rows])
        torch.testing.assert_close(getattr(after, key), expected, atol=1e-6, rtol=1e-5)


def test_other_groups_do_not_matter(algorithm, config):
    """By default every algorithm compares within a group at most."""
    first, second = scored_groups((3, 5), (1, 4))
    together = algorithm.credit(flatten([first, second]), config).advantages
    alone = torch.cat([algorithm.credit(flatten([group]), config).advantages for group in (first, second)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


# --- micro-batches


def test_weights_of_a_mini_batch_sum_to_one(algorithm, config):
    weights = train_batch(algorithm, config).streams["weights"]
    assert (weights > 0).all()
    assert weights.double().sum().item() == pytest.approx(1, abs=1e-6)


def test_micro_batches_change_neither_loss_nor_gradient_of_the_objective(algorithm, config):
    """8 rows at once are 4 times 2 rows."""
    batch = train_batch(algorithm, config).streams
    whole = moved(batch).requires_grad_()
    loss, clipped = algorithm.objective(Forward(logprobs=whole), batch, config)
    (batch["weights"] * loss).sum().backward()

    cut = whole.detach().clone().requires_grad_()
    total, num_clipped = 0.0, 0
    for group, part in enumerate(cut.split(batch.tokens_per_group.tolist())):
        micro = batch.take([group])
        part_loss, part_clipped = algorithm.objective(Forward(logprobs=part), micro, config)
        share = (micro["weights"] * part_loss).sum()
        share.backward()
        total += share.item()
        num_clipped += int(part_clipped.sum())
    assert total == pytest.approx((batch["weights"] * loss).sum().item(), abs=1e-6)
    assert num_clipped == int(clipped.sum())
    torch.testing.assert_close(cut.grad, whole.grad, atol=1e-8, rtol=1e-6)


def test_micro_batches_change_neither_loss_nor_gradient_of_a_model(algorithm, config):
    model = make_model("qwen3")
    scored = [with_old_logprobs(model, group) for group in scored_groups(*SHAPES)]
    batch, policy = train_batch(algorithm, config, scored), Policy(model)

    def loss_and_gradient(parts):
        model.module.zero_grad(set_to_none=True)
        total = 0.0
        for part in parts:
            groups, streams = [batch.groups[i] for i in part], batch.streams.take(part)
            micro = micro_loss(policy, groups, streams, Method(algorithm, config), temperature=1.0)
            micro.loss.backward()
            total += float(micro.loss.detach())
        return total, {name: p.grad for name, p in model.module.named_parameters()}

    loss, gradient = loss_and_gradient([range(len(batch.groups))])
    cut_loss, cut_gradient = loss_and_gradient([[i] for i in range(len(batch.groups))])
    assert cut_loss == pytest.approx(loss, abs=1e-5)
    assert max(float(g.abs().max()) for g in gradient.values()) > 0.1
    for key, expected in gradient.items():
        torch.testing.assert_close(cut_gradient[key], expected, atol=1e-5, rtol=1e-5)


def with_old_logprobs(model, scored):
    """The same group with the model's own log-probs, slightly moved, as those of the old policy."""
    with torch.no_grad():
        flat = completion_logprobs(model, [scored.group])
    generator = torch.Generator().manual_seed(len(flat))
    flat = flat + 0.1 * torch.randn(len(flat), generator=generator)
    return dataclasses.replace(scored, evidence=scored.evidence.adding(old_logprobs=flat, behaviour_logprobs=flat))
