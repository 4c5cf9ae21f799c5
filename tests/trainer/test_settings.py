"""Every setting of an update acts: two updates are those of a plain loop over whole sequences with its own AdamW."""

import math
from pathlib import Path

import pytest
import torch

from tests.fakes import make_model, make_module, plain_logprobs, ragged_groups, rollout_group
from tests.trainer.test_step import batch, largest_difference, parts, weights_of
from topd import algorithms
from topd.assemble import make_trainer
from topd.config import TrainerConfig
from topd.errors import RunStopped
from topd.models.logprobs import completion_logprobs
from topd.models.policy import Policy
from topd.ragged import Ragged
from topd.trainer.step import Trainer
from topd.types import TrainBatch

TEMPERATURE, CLIP, NORM, DECAY, BETAS, RATE = 0.7, 0.3, 0.5, 0.1, (0.8, 0.95), 1e-3
RATES = [RATE, RATE * 2 / 3]
"""Linear, of three updates."""


def minibatch(seed: int) -> TrainBatch:
    """Two groups with advantages of both signs, and old log-probs that are off by more than the clip for some tokens."""
    generator = torch.Generator().manual_seed(seed)
    module = make_module()
    groups, parts_of = [], []
    for number, tokens in enumerate(ragged_groups((4, (5, 2)), (2, (3, 6)), seed=seed)):
        with torch.no_grad():
            own = torch.cat([plain_logprobs(module, tokens.prompt_ids, c, temperature=TEMPERATURE) for c in tokens.completions])
        streams = [torch.randn(len(own), generator=generator) for _ in range(2)]
        weights = torch.full((len(own),), 1 / (2 * len(own)))
        groups.append(rollout_group(f"train/{number}", tokens.prompt_ids, tokens.completions))
        shape = Ragged.of([tokens.completions])
        parts_of.append(shape.adding(old_logprobs=own + streams[0], advantages=streams[1], weights=weights))
    return TrainBatch(groups=tuple(groups), streams=Ragged.join(parts_of))


def plain_loss(module: torch.nn.Module, trained: TrainBatch) -> torch.Tensor:
    """The weighted sum of -min(r A, clip(r) A), token by token; both bounds and the free part must occur."""
    total, sides = torch.zeros(()), set()
    by_group = zip(*(trained.streams.by_group(name) for name in ("old_logprobs", "advantages", "weights")), strict=True)
    for group, numbers in zip(trained.groups, by_group, strict=True):
        found = torch.cat([plain_logprobs(module, group.prompt_ids, c, temperature=TEMPERATURE) for c in group.completions])
        streams = zip(found, *numbers, strict=True)
        for logprob, old, advantage, weight in streams:
            ratio = (logprob - old).exp()
            bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
            total = total - weight * torch.minimum(ratio * advantage, bounded * advantage)
            sides.add((bool(ratio * advantage > bounded * advantage), bool(advantage > 0)))
    assert len(sides) == 4
    return total


def plain_updates(module: torch.nn.Module, batches: list[TrainBatch]) -> list[tuple[float, float]]:
    """Loss and norm of each. AdamW by its formulas (arXiv 1711.05101, algorithm 2), with decay on matrices only."""
    parameters, seen = dict(module.named_parameters()), []
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    for number, (trained, rate) in enumerate(zip(batches, RATES, strict=True), 1):
        loss = plain_loss(module, trained)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        assert norm > NORM
        seen.append((float(loss.detach()), norm))
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                gradient = gradient * NORM / norm
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient.square()
                step = first[name] / (1 - BETAS[0] ** number) / ((second[name] / (1 - BETAS[1] ** number)).sqrt() + 1e-8)
                decayed = parameter * rate * DECAY if parameter.ndim >= 2 else 0.0
                parameter.copy_(parameter - decayed - rate * step)
    return seen


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_two_updates_are_those_of_a_plain_loop(max_tokens: int) -> None:
    config = TrainerConfig(
        learning_rate=RATE,
        betas=list(BETAS),
        weight_decay=DECAY,
        schedule="linear",
        max_grad_norm=NORM,
        max_tokens_per_microbatch=max_tokens,
    )
    method = algorithms.bind(algorithms.load("topd").Config(clip=CLIP))
    trainer = Trainer(Policy(make_model(), config), method, config, temperature=TEMPERATURE, total_updates=3)
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.trainable().items()}
    batches = [minibatch(seed=1), minibatch(seed=2)]
    reports = [trainer.update(trained) for trained in batches]
    expected = make_module()
    seen = plain_updates(expected, batches)
    assert [report.loss for report in reports] == pytest.approx([loss for loss, _ in seen], abs=1e-5)
    assert [report.grad_norm for report in reports] == pytest.approx([norm for _, norm in seen], rel=1e-4)
    assert [report.learning_rate for report in reports] == pytest.approx(RATES)
    wanted = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    assert wanted.keys() == before.keys()
    for name, parameter in trainer.policy.trainable().items():
        moved, off = ((wanted[name] - start).abs().mean() for start in (before[name], parameter.detach()))
        assert off.item() < 2e-3 * moved.item(), (name, off, moved)


def test_the_ratio_is_taken_at_the_temperature_of_the_rollouts(tmp_path: Path) -> None:
    made, trained = parts(tmp_path, rollout__temperature=0.6), batch()
    expected = completion_logprobs(made.student, trained.groups, temperature=0.6).detach() - trained.streams["old_logprobs"]
    report = make_trainer(made).update(trained)
    torch.testing.assert_close(report.log_importance, expected, atol=1e-4, rtol=0)


def test_the_schedule_spans_all_epochs(tmp_path: Path) -> None:
    """Two steps of two mini-batches, three times each: twelve updates."""
    made = parts(tmp_path, trainer__schedule="linear", trainer__epochs=3, trainer__learning_rate=1e-3)
    trainer = make_trainer(made)
    rates = [trainer.update(batch()).learning_rate for _ in range(2)]
    assert rates == pytest.approx([1e-3, 1e-3 * 11 / 12])


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_no_weight(tmp_path: Path) -> None:
    """The loss is finite; the squares of its gradient are not."""
    trainer = make_trainer(parts(tmp_path))
    before = weights_of(trainer)
    with pytest.raises(RunStopped, match=r"the gradient of update 1 is not finite \(prompts train/0"):
        trainer.update(batch(advantage=1e30))
    assert largest_difference(weights_of(trainer), before) == 0
    assert (trainer.policy.version, trainer.reports) == (0, ())


def test_reports_are_those_of_the_step_in_order(tmp_path: Path) -> None:
    trainer = make_trainer(parts(tmp_path))
    made = (trainer.update(batch()), trainer.update(batch(num_groups=2)))
    assert [report.num_tokens for report in trainer.reports] == [report.num_tokens for report in made]
    trainer.begin_step()
    assert (trainer.reports, trainer.policy.version) == ((), 2)
