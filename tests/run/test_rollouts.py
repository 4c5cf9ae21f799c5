"""What the updates saw, as written: one row for every time that a completion was trained on."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.fakes import rollout_group, scored_groups
from topd.ragged import Ragged
from topd.run import columns, rollouts
from topd.trainer.batch import flatten, make_batches
from topd.types import Credit, TrainBatch, UpdateReport

SHAPES = ((3, 2), (1, 4), (2, 2, 5))


def batches(epochs: int, minibatch_prompts: int = 2) -> list[TrainBatch]:
    groups = scored_groups(*SHAPES)
    zeros = torch.zeros(sum(map(sum, SHAPES)))
    credit = Credit(advantages=zeros, token_rewards=zeros, returns=zeros)

    def weighting(lengths: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
        return torch.full((int(lengths.sum()),), 1 / int(lengths.sum()))

    return make_batches(
        groups,
        flatten(groups),
        credit,
        weighting=weighting,
        minibatch_prompts=minibatch_prompts,
        epochs=epochs,
        seed=(0, "batches", 1),
    )


def report(num_tokens: int, seed: int) -> UpdateReport:
    generator = torch.Generator().manual_seed(seed)
    log_importance = torch.randn(num_tokens, generator=generator)
    clipped = torch.rand(num_tokens, generator=generator) < 0.4
    return UpdateReport(loss=0.0, grad_norm=0.0, learning_rate=0.0, log_importance=log_importance, clipped=clipped)


def tokens_of(batch: TrainBatch) -> int:
    return sum(len(completion) for group in batch.groups for completion in group.completions)


def written(path: Path, made: list[TrainBatch], reports: list[UpdateReport], before: int = 0) -> list[dict]:
    rollouts.write_updates(path, made, reports, policy_version=before)
    table = pq.ParquetFile(path).read()
    assert table.schema.equals(columns.UPDATES)
    return table.to_pylist()


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_completion_has_a_row_for_each_of_its_updates(tmp_path: Path, epochs: int) -> None:
    made = batches(epochs)
    rows = written(tmp_path / "step.parquet", made, [report(tokens_of(batch), i) for i, batch in enumerate(made)], before=10)
    assert len(made) == 2 * epochs
    sizes = {f"train/{i}": len(shape) for i, shape in enumerate(SHAPES)}
    found: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        found.setdefault((row["prompt_id"], row["rollout"]), []).append(row["update"])
        shape = SHAPES[int(row["prompt_id"].removeprefix("train/"))]
        assert len(row["importance_ratios"]) == len(row["clipped"]) == shape[row["rollout"]]
    assert found.keys() == {(name, i) for name, size in sizes.items() for i in range(size)}
    for updates in found.values():
        assert len(updates) == epochs
        assert [(update - 11) // 2 for update in updates] == list(range(epochs))
    assert [row["update"] for row in rows] == sorted(row["update"] for row in rows)


def test_the_numbers_are_those_of_the_reports_in_order(tmp_path: Path) -> None:
    made = batches(2)
    reports = [report(tokens_of(batch), i) for i, batch in enumerate(made)]
    rows = iter(written(tmp_path / "step.parquet", made, reports))
    for number, (batch, of_update) in enumerate(zip(made, reports, strict=True), 1):
        at = 0
        for group in batch.groups:
            for i, completion in enumerate(group.completions):
                row = next(rows)
                end = at + len(completion)
                assert (row["prompt_id"], row["rollout"], row["update"]) == (group.prompt.id, i, number)
                assert row["importance_ratios"] == pytest.approx(of_update.log_importance[at:end].exp().tolist(), rel=1e-6)
                assert row["clipped"] == of_update.clipped[at:end].tolist()
                at = end
        assert at == of_update.num_tokens
    assert next(rows, None) is None


def test_a_worked_example(tmp_path: Path) -> None:
    stream = torch.zeros(3)
    group = rollout_group("a", (1,), ((5, 6), (7,)))
    streams = Ragged.of([group.completions]).adding(old_logprobs=stream, advantages=stream, weights=stream)
    log_importance = torch.tensor([0.0, 2.0, 0.5]).log()
    seen = UpdateReport(
        loss=0.0, grad_norm=0.0, learning_rate=0.0, log_importance=log_importance, clipped=torch.tensor([False, True, False])
    )
    rows = written(tmp_path / "new/folder/step.parquet", [TrainBatch(groups=(group,), streams=streams)], [seen], before=6)
    assert rows == [
        {"prompt_id": "a", "rollout": 0, "update": 7, "importance_ratios": [0.0, 2.0], "clipped": [False, True]},
        {"prompt_id": "a", "rollout": 1, "update": 7, "importance_ratios": [0.5], "clipped": [False]},
    ]


def test_a_step_without_updates_is_an_empty_table(tmp_path: Path) -> None:
    assert written(tmp_path / "step.parquet", [], []) == []


def test_batches_and_reports_must_match_and_nothing_is_left_behind(tmp_path: Path) -> None:
    made = batches(1)
    with pytest.raises(ValueError, match="zip"):
        rollouts.write_updates(tmp_path / "step.parquet", made, [report(tokens_of(made[0]), 0)], policy_version=0)
    assert list(tmp_path.iterdir()) == []


def test_written_updates_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    made = batches(1)
    reports = [report(tokens_of(batch), i) for i, batch in enumerate(made)]
    path.write_text("half a file")
    first = written(path, made, reports)
    assert written(path, made, reports) == first
    assert [file.name for file in tmp_path.iterdir()] == ["step.parquet"]
