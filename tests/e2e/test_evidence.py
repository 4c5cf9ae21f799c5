"""An algorithm that asks for whole distributions: from its NEEDS to the stored step, with no other source file."""

import json
import sys

import pyarrow.parquet as pq
import pytest
import torch

import topd
from tests.e2e.extending import modules
from tests.e2e.tiny import tiny_config
from topd.errors import ConfigError

SOURCE = modules()["mine/crossentropy.py"]


@pytest.fixture
def crossentropy(tmp_path, monkeypatch):
    """The module in a package of the user's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/crossentropy.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine/crossentropy.py"
    for name in ("mine.crossentropy", "mine"):
        sys.modules.pop(name, None)


def test_whole_distributions_reach_the_objective_and_the_stored_step(crossentropy, tmp_path):
    tree = tiny_config(tmp_path / "run", algorithm={"type": "mine.crossentropy"}, trainer__learning_rate=0.0001, run__steps=4)
    topd.train(tree)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    table = pq.read_table(tmp_path / "run/rollouts/step_000001.parquet")
    for tokens, ids, logprobs in zip(
        *(table[name].to_pylist() for name in ("completion_ids", "teacher_top_ids", "teacher_top_logprobs")), strict=True
    ):
        assert [len(row) for row in ids] == [3] * len(tokens)
        assert all(row == sorted(row, reverse=True) for row in logprobs)


def test_a_step_stored_with_distributions_is_resumed_between_two_updates(crossentropy, tmp_path, monkeypatch):
    from topd.trainer.step import Trainer

    tree = tiny_config(tmp_path / "run", algorithm={"type": "mine.crossentropy"}, run__steps=2)
    whole = tiny_config(tmp_path / "whole", algorithm={"type": "mine.crossentropy"}, run__steps=2)
    topd.train(whole)
    update = Trainer.update

    def stopping(trainer, batch):
        if trainer.policy.version == 3:
            raise KeyboardInterrupt
        return update(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stopping)
        with pytest.raises(KeyboardInterrupt):
            topd.train(tree)
    topd.train({**tree, "run": {**tree["run"], "resume": True}})
    first, second = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "run"))
    assert first == second


def test_what_no_table_names_is_an_error(crossentropy, tmp_path):
    crossentropy.write_text(SOURCE.replace('"teacher_top_ids", ', '"teacher_mood", ', 1))
    with pytest.raises(ConfigError, match=r"needs 'teacher_mood', which is none of .*teacher_top_logprobs"):
        topd.train(tiny_config(tmp_path / "run", algorithm={"type": "mine.crossentropy"}))


def test_top_ids_are_moved_with_their_tokens():
    """Cut and joined as every other stream: k entries stay with their token."""
    from topd.ragged import Ragged, Rows

    whole = Ragged.of([[(1, 2), (3,)], [(4, 5, 6)]]).adding(teacher_top_ids=torch.arange(12).reshape(6, 2))
    piece = whole.cut([Rows(1, 0, 1), Rows(0, 1, 2)])
    assert piece["teacher_top_ids"].tolist() == [[6, 7], [8, 9], [10, 11], [4, 5]]
