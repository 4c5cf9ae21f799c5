"""The real trackers, offline: one run stopped after two steps of three, resumed, and read back from what they stored."""

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import tiny_config
from tests.trackers.tracking import CONFIG, make_folder, row
from topd import trackers
from topd.api import train
from topd.run.catalogue import VOLATILE
from topd.run.files import read_lines
from topd.run.interrupt import Interrupted
from topd.run.progress import Display
from topd.trackers import PACKAGES, Trackers

NAMES = list(PACKAGES)
USERS_OWN = ("WANDB_", "MLFLOW_", "TRACKIO_", "NETRC")


def stop(display: Display, row: Mapping[str, Any], *, steps: int) -> None:
    """A Ctrl-C when the second step is done and not yet sent."""
    if row["step"] == 2:
        raise Interrupted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without trackers, and one with all of them in two parts. Both folders are called my-run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(USERS_OWN)]:
            patch.delenv(name)
        home = tmp_path_factory.mktemp("home")  # no login, and nothing may be written there
        patch.setenv("HOME", str(home))
        plain, tracked = (tmp_path_factory.mktemp(name) / "my-run" for name in ("plain", "tracked"))
        patch.setattr(trackers, "ANSWER_S", 300.0)
        patch.setattr(trackers, "FLUSH_S", 300.0)  # a busy machine may be slow; the bound is tested with fakes
        train(tiny_config(plain, run__steps=3, eval__every_steps=2))
        changes = {"run__trackers": NAMES, "eval__every_steps": 2}
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as stopping:
            stopping.setattr(Display, "step_line", stop)
            train(tiny_config(tracked, run__steps=4, **changes))
        with contextlib.closing(sqlite3.connect(tracked / "trackers" / "mlflow" / "mlflow.db")) as store:
            assert store.execute("select status from runs").fetchall() == [("KILLED",)]
        train(tiny_config(tracked, run__steps=3, run__resume=True, **changes))
        assert list(home.rglob("*")) == []
    return plain, tracked


def metric(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in read_lines(folder / "metrics.jsonl")]


def evaluated(folder: Path, who: str) -> list[tuple[int, float]]:
    return [(row["step"], row["avg_at_k"]) for row in read_lines(folder / "evals.jsonl") if row["model"] == who]


def last_part(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def reader(script: str, *words: str, **environment: str) -> Any:
    """What a script prints as JSON, in a process of its own: these libraries warn, log and set signal handlers."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_leaves_the_same_with_and_without_trackers(runs):
    plain, tracked = runs
    for name in ("model/model.safetensors", "evals.jsonl", "vocabulary.parquet", "environment.json"):
        assert (plain / name).read_bytes() == (tracked / name).read_bytes()
    for folder in ("rollouts", "updates"):
        assert [p.read_bytes() for p in sorted((plain / folder).iterdir())] == [
            p.read_bytes() for p in sorted((tracked / folder).iterdir())
        ]
    rows = [
        [{k: v for k, v in row.items() if k not in VOLATILE} for row in read_lines(folder / "metrics.jsonl")] for folder in runs
    ]
    assert rows[0] == rows[1]
    assert not (plain / "trackers").exists()
    assert sorted(path.name for path in (tracked / "trackers").iterdir()) == sorted(NAMES)


def test_tensorboard(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = runs[1]
    found = EventAccumulator(str(folder / "trackers" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(event.step, pytest.approx(event.value, rel=1e-6)) for event in found.Scalars(tag)]

    def text(tag: str) -> str:
        return found.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()

    numbers = {key for line in read_lines(folder / "metrics.jsonl") for key, value in line.items() if value is not None}
    tags = set(found.Tags()["scalars"])
    assert {tag for tag in tags if not tag.startswith(("eval/", "final/"))} == numbers
    assert metric(folder, "train/loss") == scalars("train/loss")
    assert evaluated(folder, "student") == scalars("eval/held_out/student/avg_at_k")
    assert evaluated(folder, "teacher") == scalars("eval/held_out/teacher/avg_at_k")
    student = last_part(folder)["student"]
    assert [(3, student["ci95"][1])] == scalars("final/held_out/student/ci95_high")[-1:]
    assert "| run.steps | 3 |" in text("config")
    assert '| algorithm.type | "topd" |' in text("config")
    assert "| python |" in text("environment")
    assert "| held_out | teacher | 4 | 2 |" in text("final")
    assert text("status") == "finished"


def test_tensorboard_shows_a_step_that_was_done_again_once_and_anew(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = make_folder(tmp_path / "my-run")
    for steps_done, steps, loss in ((0, 3, 1.0), (2, 4, 2.0)):
        with Trackers(["tensorboard"], folder, CONFIG, print) as tracked:
            tracked.open(steps_done)
            for step in range(steps_done + 1, steps + 1):
                tracked.step({"step": step, "train/loss": loss})
    found = EventAccumulator(str(folder / "trackers" / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_mlflow(runs):
    folder = runs[1]
    path = folder / "trackers" / "mlflow" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as store:  # its client takes three seconds to read the same
        ((name, status, experiment, artifacts),) = store.execute(
            "select r.name, r.status, e.name, r.artifact_uri from runs r join experiments e using (experiment_id)"
        )
        metrics = list(store.execute("select key, step, value from metrics order by step"))
        params, tags = (dict(store.execute(f"select key, value from {table}")) for table in ("params", "tags"))
    assert (name, status, experiment) == ("my-run", "FINISHED", "topd")

    def history(key: str) -> list[tuple[int, float]]:
        return [(step, value) for found, step, value in metrics if found == key]

    numbers = {key for line in read_lines(folder / "metrics.jsonl") for key, value in line.items() if value is not None}
    assert {key for key, _, _ in metrics if not key.startswith(("eval/", "final/"))} == numbers
    assert history("train/loss") == metric(folder, "train/loss")
    assert history("eval/held_out/student/avg_at_k") == evaluated(folder, "student")
    assert history("final/held_out/teacher/avg_at_k")[-1] == (3, last_part(folder)["teacher"]["avg_at_k"])
    assert params["algorithm.type"] == '"topd"'
    assert (params["run.steps"], tags["config.run.steps"]) == ("4", "3")
    assert "environment.python" in tags
    content = json.loads((Path(artifacts) / "final.json").read_text())
    assert content["columns"][:2] == ["benchmark", "model"]
    assert [line[1] for line in content["data"]] == ["base", "student", "teacher"]


READ_TRACKIO = """
import contextlib, json, sys
with contextlib.redirect_stdout(sys.stderr):
    import trackio
    (found,) = trackio.Api().runs("topd")
    from trackio.sqlite_storage import SQLiteStorage
    logs = SQLiteStorage.get_logs("topd", found.name)
    config = found.config
print(json.dumps({"name": found.name, "config": config, "logs": logs}))
"""


def test_trackio(runs):
    folder = runs[1]
    found = reader(READ_TRACKIO, TRACKIO_DIR=str(folder / "trackers" / "trackio"))
    logs = found["logs"]
    assert found["name"] == "my-run"
    assert found["config"]["algorithm.type"] == "topd"
    assert "environment.python" in found["config"]
    assert [(line["step"], line["train/loss"]) for line in logs if "train/loss" in line] == metric(folder, "train/loss")
    name = "eval/held_out/student/avg_at_k"
    assert [(line["step"], line[name]) for line in logs if name in line] == evaluated(folder, "student")
    final = [line for line in logs if "final" in line][-1]
    assert [line["model"] for line in final["final"]["_value"]] == ["base", "student", "teacher"]
    name = "final/held_out/teacher/ci95_low"
    assert [line[name] for line in logs if name in line][-1] == last_part(folder)["teacher"]["ci95"][0]
    assert [line["status"] for line in logs if "status" in line] == ["stopped", "finished"]


def test_trackio_keeps_runs_of_one_name_apart_in_a_store_they_share(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(USERS_OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trackers, "FLUSH_S", 300.0)
    monkeypatch.setattr(trackers, "ANSWER_S", 300.0)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        make_folder(tmp_path / parent / "my-run")
    for parent, step in (("a", 1), ("b", 10), ("a", 2)):
        with Trackers(["trackio"], tmp_path / parent / "my-run", CONFIG, print) as tracked:
            tracked.open(step - 1)
            tracked.step(row(step))
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "topd.db")) as store:
        found = store.execute(
            "select run_name, step from metrics where cast(metrics as text) like '%train/loss%' order by id"
        ).fetchall()
    assert [step for _, step in found] == [1, 10, 2]
    assert found[0][0] == found[2][0] != found[1][0]
    assert all(name.startswith("my-run-") for name, _ in found)


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline file: a LevelDB log of protobuf messages (wandb has no public reader)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, begun, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        begun += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or last part
            found.append(Record.FromString(begun))
            begun = b""
    return found


def wandb_items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb(runs):
    folder = runs[1]
    parts = [wandb_records(path) for path in sorted((folder / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb"))]
    begun = [record.run for part in parts for record in part if record.WhichOneof("record_type") == "run"]
    assert [(each.project, each.display_name) for each in begun] == [("topd", "my-run")] * 2
    assert begun[0].run_id == begun[1].run_id
    config = wandb_items(begun[1].config.update)
    assert config["run"]["steps"] == 3
    assert config["algorithm"]["type"] == "topd"
    assert "python" in config["environment"]
    rows = [record.history for part in parts for record in part if record.WhichOneof("record_type") == "history"]
    logs = [wandb_items(each.item) for each in rows]
    assert [each.step.num for each in rows] == list(range(len(rows)))  # goes on over the resume
    assert [(line["step"], line["train/loss"]) for line in logs if "train/loss" in line] == metric(folder, "train/loss")
    name = "eval/held_out/student/avg_at_k"
    assert [(line["step"], line[name]) for line in logs if name in line] == evaluated(folder, "student")
    name = "final/held_out/teacher/ci95_low"
    assert [line[name] for line in logs if name in line][-1] == last_part(folder)["teacher"]["ci95"][0]
    assert any("final/nrows" in line for line in logs)
    (table, *_) = (folder / "trackers" / "wandb").rglob("final_*.table.json")
    assert [line[1] for line in json.loads(table.read_text())["data"]] == ["base", "student", "teacher"]
    assert {each.host for each in begun} == {"-"}
    files = {path.name for path in (folder / "trackers" / "wandb" / "wandb").glob("offline-run-*/files/*")}
    assert files == {"media"}  # no list of packages, no metadata of the machine
    assert [record.exit.exit_code for part in parts for record in part if record.WhichOneof("record_type") == "exit"] == [1, 0]


def test_the_users_environment_decides_where(tmp_path, monkeypatch):
    """A server that refuses: the tracker is off, and nothing of the key is shown."""
    for name in [name for name in os.environ if name.startswith(USERS_OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(trackers, "FLUSH_S", 300.0)
    monkeypatch.setattr(trackers, "ANSWER_S", 300.0)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = make_folder(tmp_path / "my-run")
    lines: list[str] = []
    with Trackers(["mlflow", "wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        tracked.step(row(1))
    off = [line for line in lines if "is off" in line]
    assert sorted(line.split()[1] for line in off) == ["mlflow", "wandb"]
    assert any("no answer from http://127.0.0.1:9." in line for line in off)
    assert max(map(len, off)) < 500
    assert "0123456789abcdef" not in "".join(lines)
