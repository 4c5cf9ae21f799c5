"""An update does what its configuration says, and nothing where something is not finite."""

import math
from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import tiny_config
from tests.fakes import rollout_group
from topd import config_file
from topd.assemble import Parts, assemble, make_trainer
from topd.errors import RunStopped
from topd.models.logprobs import completion_logprobs
from topd.ops.objective import is_clipped
from topd.ops.weighting import group_token_mean
from topd.ragged import Ragged
from topd.trainer.step import Trainer
from topd.types import TrainBatch


def parts(tmp_path: Path, **changes: object) -> Parts:
    return assemble(config_file.load(tiny_config(tmp_path / "run", **changes)))


def batch(advantage: float = 1.0, num_groups: int = 4) -> TrainBatch:
    completions = [((5, 6, 7), (8, 1)), ((9, 1), (4,)), ((3, 3, 3, 3, 1), (2, 1)), ((6, 1), (7, 7, 1))][:num_groups]
    shape = Ragged.of(completions)
    streams = shape.adding(
        old_logprobs=torch.full((shape.num_tokens,), -2.5),
        advantages=advantage * torch.cat([torch.tensor([1.0, -1.0] * 8)[:size] for size in shape.tokens_per_group]),
        weights=group_token_mean(shape.lengths, shape.group_sizes),
    )
    groups = tuple(rollout_group(f"train/{i}", (3, 12, 4 + i, 13), group) for i, group in enumerate(completions))
    return TrainBatch(groups=groups, streams=streams)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.policy.trainable().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("max_tokens", [1, 8, 10_000], ids=["one group each", "some", "all at once"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_and_checkpointing_change_nothing(tmp_path: Path, max_tokens: int, checkpointing: bool) -> None:
    def after_update(**changes: object) -> dict[str, torch.Tensor]:
        trainer = make_trainer(parts(tmp_path, **changes))
        trainer.update(batch())
        return {name: parameter.grad.clone() for name, parameter in trainer.policy.trainable().items()}

    expected = after_update(trainer__max_tokens_per_microbatch=10_000)
    found = after_update(trainer__max_tokens_per_microbatch=max_tokens, trainer__gradient_checkpointing=checkpointing)
    assert largest_difference(found, expected) < 1e-6


@pytest.mark.parametrize("max_tokens", [1, 8, 30, 10_000])
def test_the_report_is_in_the_order_of_the_mini_batch(tmp_path: Path, max_tokens: int) -> None:
    """Micro-batches take long groups first and may cut a group; each token's ratio and clip are still its own."""
    made = parts(tmp_path, trainer__max_tokens_per_microbatch=max_tokens)
    trainer, minibatch = make_trainer(made), batch()
    alone = [completion_logprobs(made.student, [group], temperature=1.0).detach() for group in minibatch.groups]
    expected = torch.cat(alone) - minibatch.streams["old_logprobs"]
    report = trainer.update(minibatch)
    torch.testing.assert_close(report.log_importance, expected, atol=1e-4, rtol=0)
    clipped = is_clipped(expected, minibatch.streams["advantages"], clip_low=0.2, clip_high=0.2)
    assert 0 < int(clipped.sum()) < len(clipped)
    assert torch.equal(report.clipped, clipped)


def test_gradients_are_scaled_to_the_norm_and_reported_before(tmp_path: Path) -> None:
    trainer = make_trainer(parts(tmp_path, trainer__max_grad_norm=0.01))
    report = trainer.update(batch())
    assert report.grad_norm > 0.01
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in trainer.policy.trainable().values()))
    assert norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0]),
        ("constant", 2, [0.5, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0.5, 1.0, 1.0, 0.5]),  # after warm-up: half cosine at 0 and 1/2
    ],
)
def test_learning_rates_of_a_run_of_four_updates(tmp_path: Path, schedule: str, warmup: int, expected: list[float]) -> None:
    changes = {"trainer__schedule": schedule, "trainer__warmup_updates": warmup, "trainer__learning_rate": 1e-3}
    trainer = make_trainer(parts(tmp_path, **changes))  # 2 steps of 2 updates
    rates = [trainer.update(batch()).learning_rate for _ in range(4)]
    assert rates == pytest.approx([1e-3 * share for share in expected])
    assert trainer.policy.version == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_changes_no_weight(tmp_path: Path, bad: float) -> None:
    trainer = make_trainer(parts(tmp_path))
    before = weights_of(trainer)
    with pytest.raises(RunStopped, match=r"the loss of update 1 is not finite \(prompts train/"):
        trainer.update(batch(advantage=bad))
    assert largest_difference(weights_of(trainer), before) == 0
    assert trainer.policy.version == 0


def test_the_first_update_sees_the_ratio_of_the_streams_it_was_given(tmp_path: Path) -> None:
    made = parts(tmp_path)
    report = make_trainer(made).update(batch())
    assert report.num_tokens == batch().streams.num_tokens
    assert report.log_importance.shape == (report.num_tokens,)


def test_bfloat16_keeps_float32_weights_and_comes_close(tmp_path: Path) -> None:
    exact, rounded = (make_trainer(parts(tmp_path, trainer__dtype=dtype)) for dtype in ("float32", "bfloat16"))
    one, other = exact.update(batch()), rounded.update(batch())
    assert {parameter.dtype for parameter in rounded.policy.trainable().values()} == {torch.float32}
    assert other.log_importance.dtype == torch.float32
    assert 1e-3 < float((one.log_importance - other.log_importance).abs().max()) < 0.1  # rounded, but no more than that


def test_adapters_alone_are_trained(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = make_trainer(parts(tmp_path, student__lora={"rank": 2}))
    assert all("lora" in name for name in trainer.policy.trainable())
    frozen = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters() if not p.requires_grad}
    before = weights_of(trainer)
    trainer.update(batch())
    assert largest_difference(weights_of(trainer), before) > 0
    assert all(torch.equal(frozen[n], p) for n, p in trainer.policy.module.named_parameters() if n in frozen)
