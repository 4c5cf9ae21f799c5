"""A folder written under the names of earlier versions is resumed, and read, as one of today."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import topd
from tests.e2e.tiny import tiny_config
from tests.report.test_explain import shown
from topd import config_file
from topd.loop import run
from topd.report.stored import read_run
from topd.run import checkpoint, digests
from topd.run.catalogue import renamed
from topd.run.interrupt import Interrupted
from topd.trainer.step import Trainer


def under_former_names(folder: Path) -> Path:
    """The same folder as an earlier version wrote it, which had no digests of its files either."""
    for file in folder.glob("rollouts/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns(["reward" if name == "grade" else name for name in table.column_names]), file)
    log = folder / "metrics.jsonl"
    log.write_text(re.sub(r'"grade/', '"reward/', log.read_text()))
    for file in folder.glob("checkpoints/*/reports.safetensors"):
        streams = {name.replace("log_importance", "log_ratio"): stream.clone() for name, stream in load_file(file).items()}
        save_file(streams, file)
        marker = file.parent / checkpoint.MARKER
        marker.write_text(json.dumps({"sha256": digests.of_folder(file.parent, but=marker.name)}))
    (folder / "digests.jsonl").unlink()
    return folder


def config(folder: Path, **changes: object):
    return config_file.load(tiny_config(folder, run__steps=3, trainer__minibatch_prompts=1, run__checkpoint_every=10, **changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; treat it as read-only."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config(folder))
    return folder


def test_a_run_that_was_stopped_in_the_middle_of_a_step_is_resumed(whole: Path, tmp_path: Path) -> None:
    """The stored step, the log, and the updates that were made already: all of them under their former names."""
    update, made = Trainer.update, 0

    def stopping_update(self, batch):
        nonlocal made
        if made == 5:
            raise Interrupted("SIGINT")
        made += 1
        return update(self, batch)

    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", stopping_update)
        with pytest.raises(Interrupted):
            run(config(folder))
    under_former_names(folder)
    assert "reward" in pq.read_schema(folder / "rollouts/step_000002.parquet").names
    run(config(folder, run__resume=True))
    for file in ("model/model.safetensors", "updates/step_000002.parquet", "rollouts/step_000003.parquet", "evals.jsonl"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    first, second, third = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "reward/mean" in first
    assert "grade/mean" in second
    assert "grade/mean" in third
    assert None not in read_run(folder).series("grade/mean")


def test_report_explain_and_rescore_read_it_as_one_of_today(whole: Path, tmp_path: Path) -> None:
    today, former = shutil.copytree(whole, tmp_path / "run"), shutil.copytree(whole, tmp_path / "former/run")
    (today / "digests.jsonl").unlink()
    under_former_names(former)
    one, other = read_run(today), read_run(former)
    assert one.metrics == other.metrics
    assert {"grade/mean", "grade/std_in_group", "grade/grader_errors"} <= other.metrics[0].keys()
    assert shown(today, step=1).replace(str(today), "") == shown(former, step=1).replace(str(former), "")
    assert topd.rescore(today, "--algorithm.alpha", "0.1") == topd.rescore(former, "--algorithm.alpha", "0.1")
    grades = [[rollout.grade for group in r.step(1).groups for rollout in group.rollouts] for r in (one, other)]
    assert grades[0] == grades[1]


def test_rows_of_several_teachers() -> None:
    row = {"step": 1, "reward/mean": 0.5, "teacher/math/reward": -0.1, "teacher/reward/gap": 2.0, "token_reward/mean": -0.2}
    assert renamed(row) == {
        "step": 1,
        "grade/mean": 0.5,
        "teacher/math/token_reward": -0.1,
        "teacher/reward/gap": 2.0,
        "token_reward/mean": -0.2,
    }
