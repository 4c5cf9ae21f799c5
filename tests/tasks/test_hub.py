"""Data sets through `datasets`, from a local folder as from the hub."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("datasets")

from topd.config import HubConfig
from topd.errors import ConfigError
from topd.tasks.load import load_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    table = pa.table({"question": ["1+1", "2+2"], "solution": ["2", "4"], "kind": ["sums", "sums"]})
    pq.write_table(table, data / "train-00000.parquet")
    pq.write_table(table.slice(1), data / "test-00000.parquet")
    return data


def config(folder: Path, **changes: object) -> HubConfig:
    columns = {"prompt_column": "question", "answer_column": "solution", "domain_column": "kind"}
    return HubConfig(**{"type": "hub", "name": str(folder), "eval_split": "test", **columns, **changes})


def test_columns_are_mapped_and_splits_kept_apart(folder: Path) -> None:
    task = load_task(config(folder), seed=0)
    assert [(p.question, p.answer, p.domain) for p in task.train] == [("1+1", "2", "sums")]
    assert [p.question for p in task.held_out] == ["2+2"]


def test_missing_columns_and_data_sets_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no column 'prompt'; it has question, solution, kind"):
        load_task(config(folder, prompt_column="prompt"), seed=0)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_task(config(folder / "nowhere"), seed=0)
