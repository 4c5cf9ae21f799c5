"""A run folder as it is found: what is there is read exactly, what is not is named, and nothing is touched."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import topd
from tests.e2e.tiny import tiny_config
from tests.report.folders import VECTOR, update, write_metrics, write_run, write_step, write_updates
from tests.report.folders import row as row_of
from topd.errors import ConfigError
from topd.report.stored import StoredRun, names, number, read_run
from topd.run import columns

WORDS = {9: b"7", 14: b"=", 1: b";", 7: b"8"}
EVALUATION = {"benchmark": "held", "model": "student", "step": 0, "avg_at_k": 0.5, "ci95": [0.4, 0.6]}
COLUMNS = {
    "behaviour_logprob": "behaviour_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "token_reward": "token_rewards",
    "return": "returns",
    "advantage": "advantages",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs a step, so that every completion is trained on twice."""
    path = tmp_path_factory.mktemp("stored") / "alpha=0.2"
    topd.train(tiny_config(path, eval__max_problems=1, trainer__epochs=2))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {"a": VECTOR, "b": VECTOR}, words=WORDS)


def rows_of(path: Path, kind: str = "rollouts", step: int = 1) -> list[dict[str, Any]]:
    return pq.read_table(path / kind / f"step_{step:06d}.parquet", partitioning=None).to_pylist()


def rewrite(path: Path, *rows: dict[str, Any]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=columns.ROLLOUTS), path / "rollouts/step_000001.parquet")


def halve(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file and folder: when it was changed, and a digest."""
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        )
        for file in sorted([folder, *folder.rglob("*")])
    }


def everything(run: StoredRun) -> StoredRun:
    run.vocabulary()
    for step in run.steps:
        run.step(step)
    return run


def problem(path: Path) -> str:
    [found] = everything(read_run(path)).problems
    return found


def test_a_finished_run_is_read_whole(trained: Path) -> None:
    run = everything(read_run(trained))
    assert run.problems == []
    assert run.finished
    assert (run.name, run.planned_steps, run.steps) == ("alpha=0.2", 2, (1, 2))
    assert run.metrics == tuple(json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines())
    assert run.evaluations == tuple(json.loads(line) for line in (trained / "evals.jsonl").read_text().splitlines())
    assert run.summary == json.loads((trained / "summary.json").read_text())
    assert run.environment == json.loads((trained / "environment.json").read_text())
    assert run.setting("algorithm.alpha") == 0.2
    assert run.setting("algorithm.none") is run.setting("none.alpha") is run.setting("algorithm.alpha.deeper") is None
    assert run.series("teacher/gap") == [row["teacher/gap"] for row in run.metrics]


@pytest.mark.parametrize("step", [1, 2])
def test_every_number_of_a_step_is_that_of_its_file(trained: Path, step: int) -> None:
    stored = read_run(trained).step(step)
    flat = [(group, rollout) for group in stored.groups for rollout in group.rollouts]
    assert stored.step == step
    assert [group.index for group in stored.groups] == [0, 1, 2, 3]
    assert [group.num_tokens for group in stored.groups] == [
        sum(len(row["completion_ids"]) for row in rows_of(trained, step=step)[i : i + 2]) for i in (0, 2, 4, 6)
    ]
    assert [rollout.index for _, rollout in flat] == [0, 1] * 4
    for (group, rollout), row in zip(flat, rows_of(trained, step=step), strict=True):
        found = {name: getattr(group, name) for name in ("prompt_id", "domain", "prompt", "answer", "policy_version")}
        assert found == {name: row[name] for name in found}
        assert (rollout.text, rollout.finish_reason) == (row["completion"], row["finish_reason"])
        assert rollout.grade == row["grade"]
        assert rollout.token_ids == tuple(row["completion_ids"])
        for stream, column in COLUMNS.items():
            assert np.array_equal(rollout.streams[stream], np.float32(row[column]))
        ratio = np.float32(row["teacher_logprobs"]) - np.float32(row["behaviour_logprobs"])
        assert np.array_equal(rollout.streams["log_ratio"], ratio)


def test_of_several_epochs_the_last_update_counts(trained: Path) -> None:
    updates = rows_of(trained, "updates", step=2)
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for row in updates:
        key = row["prompt_id"], row["rollout"]
        last[key] = row if row["update"] > last.get(key, row)["update"] else last.get(key, row)
    assert len(updates) == 2 * len(last)
    for group in read_run(trained).step(2).groups:
        for rollout in group.rollouts:
            row = last[group.prompt_id, rollout.index]
            assert rollout.update == row["update"] > 6
            assert np.array_equal(rollout.streams["importance_ratio"], np.float32(row["importance_ratios"]))
            assert np.array_equal(rollout.streams["clipped"], np.float32(row["clipped"]))


def test_the_vocabulary_is_that_of_its_file(trained: Path) -> None:
    rows = pq.ParquetFile(trained / "vocabulary.parquet").read().to_pylist()
    assert read_run(trained).vocabulary() == {row["token_id"]: (row["text"], row["special"]) for row in rows}


def test_reading_changes_nothing_and_loads_no_torch(trained: Path) -> None:
    before = listing(trained)
    script = (
        "import sys; from topd.report.stored import read_run; run = read_run(sys.argv[1]); run.vocabulary(); run.step(1);"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", script, str(trained)], check=True)
    assert listing(trained) == before


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 3\n")
    run = read_run(tmp_path)
    assert (run.metrics, run.evaluations, run.rescores, run.steps) == ((), (), (), ())
    assert (run.summary, run.environment, run.finished, run.planned_steps) == (None, {}, False, 3)
    assert run.problems == []
    assert run.vocabulary() == {}
    assert run.problems[0].startswith("vocabulary.parquet is not there")


def test_an_interrupted_run_is_not_finished(trained: Path, tmp_path: Path) -> None:
    """A resumed run keeps the old summary until it is done: the steps have to be there as well."""
    path = shutil.copytree(trained, tmp_path / "run")
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("steps = 2", "steps = 3"))
    assert (read_run(path).finished, read_run(path).planned_steps) == (False, 3)
    (path / "config.toml").write_text(config)
    (path / "summary.json").unlink()
    assert not read_run(path).finished


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, lambda path: path.write_text("")], ids=["none", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"Give the run(\.directory of a run| folder)"):
        read_run(tmp_path / "x")


def test_no_name_is_not_the_folder_one_is_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an unset variable of a shell gives it."""
    monkeypatch.chdir(folder)
    assert read_run(".").name == "run"
    with pytest.raises(ConfigError, match="there is no run folder at ''"):
        read_run("")


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read_run("~/run").path == folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl"])
def test_lines_that_are_damaged_are_left_out_and_named(folder: Path, name: str) -> None:
    """The last line is still being written: that is no damage."""
    lines = [json.dumps({**EVALUATION, "step": step}) for step in (1, 2, 3)]
    (folder / name).write_bytes(
        f"{lines[0]}\n{lines[1][:20]}\n".encode() + b"\xff\xfe\n[1]\n" + f"{lines[2]}\n".encode() + b'{"st'
    )
    write_step(folder, {"a": VECTOR}, step=3)
    run = read_run(folder)
    assert [row["step"] for row in (run.metrics if name == "metrics.jsonl" else run.evaluations)] == [1, 3]
    lost = ["metrics.jsonl lacks steps 2: curves and totals are without them"] if name == "metrics.jsonl" else []
    assert run.problems == [f"{name}, line {line} is damaged and was left out" for line in (2, 3, 4)] + lost


@pytest.mark.parametrize(
    "line", ['{"grade/mean": 1}', '{"step": "1"}', '{"step": true}', '{"step": 1.5}', '{"step": null}', '{"step": 0}']
)
def test_metrics_without_a_step_are_left_out_and_named(folder: Path, line: str) -> None:
    (folder / "metrics.jsonl").write_text(line + '\n{"step": 1, "x": 2}\n')
    assert read_run(folder).metrics == ({"step": 1, "x": 2},)
    assert problem(folder) == "a line of metrics.jsonl names no step and was left out"


def test_metrics_are_in_the_order_of_their_steps_and_the_last_line_of_a_step_counts(folder: Path) -> None:
    write_step(folder, {"a": VECTOR}, step=2)
    write_metrics(folder, [{"step": 2, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 3}])
    assert read_run(folder).metrics == ({"step": 1, "x": 2}, {"step": 2, "x": 3})
    assert problem(folder) == "metrics.jsonl holds step 2 twice; the last line counts"


def test_steps_without_their_rollouts_are_named(folder: Path) -> None:
    write_metrics(folder, [{"step": step} for step in (1, 2, 3, 4, 7)])
    assert read_run(folder).problems == [
        "metrics.jsonl lacks steps 5 to 6: curves and totals are without them",
        "rollouts of 4 of 5 recorded steps are not there (steps 2 to 4, 7)",
    ]


def test_a_finished_run_without_metrics_or_evaluations_has_those_of_its_summary(folder: Path) -> None:
    table = {"base": EVALUATION, "student": {**EVALUATION, "step": 4}, "teacher": {"model": "teacher"}, "best": 3}
    (folder / "summary.json").write_text(json.dumps({"steps": 2, "benchmarks": {"held": table, "other": 3}}))
    run = read_run(folder)
    assert run.finished
    assert run.evaluations == (EVALUATION, {**EVALUATION, "step": 4})
    assert run.problems == [
        "evals.jsonl is not there, or empty: the evaluations are those of summary.json",
        "metrics.jsonl is not there, or empty, although the run is finished",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        *({"benchmark": None}, {"benchmark": ["held"]}, {"model": None}, {"model": 3}, {"step": None}, {"step": "1"}),
        *({"avg_at_k": None}, {"avg_at_k": "x"}, {"avg_at_k": math.nan}, {"ci95": None}, {"ci95": [0.1]}, {"ci95": [0.1, None]}),
        *({"ci95": [0.1, 0.2, 0.3]}, {"ci95": [0.1, math.inf]}, {"ci95": "ab"}),
    ],
    ids=str,
)
def test_an_evaluation_that_lacks_something_is_left_out_and_named(folder: Path, changes: dict[str, Any]) -> None:
    kept = {key: value for key, value in {**EVALUATION, **changes}.items() if value is not None}
    (folder / "evals.jsonl").write_text(json.dumps(kept) + "\n" + json.dumps(EVALUATION) + "\n")
    assert read_run(folder).evaluations == (EVALUATION,)
    assert problem(folder) == "a line of evals.jsonl is not an evaluation and was left out"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((1, 1.0), (-0.5, -0.5), (0, 0.0), (True, None), (None, None), ("1", None), ([1], None)),
        *((math.nan, None), (math.inf, None), (-math.inf, None), (10**400, None)),
    ],
)
def test_what_is_no_finite_number_is_none(value: Any, expected: float | None) -> None:
    assert number(value) == expected
    run = StoredRun(
        config={},
        environment={},
        path=Path(),
        metrics=({"step": 1, "x": value}, {"step": 2}),
        evaluations=(),
        summary=None,
        rescores=(),
        steps=(),
    )
    assert run.series("x") == [expected, None]


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b'"x"', b"3", b"null", b"\xff", b"[" * 100_000], ids=lambda c: str(c[:4]))
@pytest.mark.parametrize("name", ["summary.json", "environment.json", "rescores/x.json"])
def test_a_damaged_file_counts_as_absent_and_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / "rescores").mkdir()
    (folder / name).write_bytes(content)
    run = read_run(folder)
    assert (run.summary, run.environment, run.rescores) == (None, {}, ())
    assert problem(folder).startswith(f"{Path(name).name} could not be read (")


def test_rescores_are_read_by_name_without_those_being_written(folder: Path) -> None:
    (folder / "rescores").mkdir()
    for name in ("b.json", "a.json", "c.json.partial", "notes.txt"):
        (folder / "rescores" / name).write_text(json.dumps({"name": name}))
    assert [found["name"] for found in read_run(folder).rescores] == ["a.json", "b.json"]


@pytest.mark.parametrize("content", ["[run", "\udcff", "a = 1\na = 2"])
def test_a_damaged_configuration_is_named(folder: Path, content: str) -> None:
    (folder / "config.toml").write_text(content, encoding="utf-8", errors="surrogateescape")
    run = read_run(folder)
    assert (run.config, run.planned_steps, run.finished) == ({}, None, False)
    assert "config.toml could not be read" in problem(folder)


def test_a_setting_below_what_is_no_table_is_not_set(folder: Path) -> None:
    (folder / "config.toml").write_text('run = 3\nalgorithm = "topd"\n[teacher]\nname = "x"\n')
    run = read_run(folder)
    assert (run.setting("run.steps"), run.planned_steps, run.setting("algorithm.type"), run.setting("teacher.name")) == (
        *(None, None, None),
        "x",
    )


@pytest.mark.parametrize("kind", ["halved", "empty", "json", "folder"])
def test_unreadable_rollouts_are_named_and_the_other_steps_stand(folder: Path, kind: str) -> None:
    write_step(folder, {"c": VECTOR}, step=2)
    file = folder / "rollouts/step_000001.parquet"
    if kind == "halved":
        halve(file)
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_text("" if kind == "empty" else "{}")
    run = read_run(folder)
    assert run.step(1) is None
    assert [group.prompt_id for group in run.step(2).groups] == ["c"]
    assert run.step(1) is None
    [found] = run.problems
    assert found.startswith("rollouts of step 1 could not be read (")
    assert "\n" not in found


def test_rollouts_that_vanish_are_named(folder: Path) -> None:
    run = read_run(folder)
    shutil.rmtree(folder)
    assert everything(run).step(1) is None
    assert len(run.problems) == 2


def test_files_that_are_no_step_are_not_listed(folder: Path) -> None:
    write_step(folder, {"a": VECTOR}, step=12)
    for name in ("step_000003.parquet.partial", "step_x.parquet", "step_.parquet", "step_\u00b2.parquet", "other.parquet"):
        (folder / "rollouts" / name).write_text("")
    assert read_run(folder).steps == (1, 12)
    assert everything(read_run(folder)).problems == []


@pytest.mark.parametrize("column", ["returns", "token_rewards", "advantages", "teacher_logprobs", "behaviour_logprobs"])
def test_a_stream_that_was_not_stored_is_absent(folder: Path, column: str) -> None:
    """As in the folders of older versions."""
    file = folder / "rollouts/step_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns([column]), file)
    run = read_run(folder)
    streams = run.step(1).groups[0].rollouts[0].streams
    expected = {name for name, of in COLUMNS.items() if of != column}
    if not column.endswith("_logprobs"):
        expected.add("log_ratio")
    assert streams.keys() == expected
    assert run.problems == []


@pytest.mark.parametrize("column", ["prompt_id", "prompt", "completion", "completion_ids", "finish_reason", "grade"])
def test_a_step_without_what_it_must_have_is_named(folder: Path, column: str) -> None:
    file = folder / "rollouts/step_000001.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns([column]), file)
    assert "rollouts of step 1 could not be read" in problem(folder)
    rewrite(folder, *({**row, column: None} for row in table.to_pylist()))
    assert "rollouts of step 1 could not be read" in problem(folder)


def test_streams_of_another_length_are_named(folder: Path) -> None:
    rewrite(folder, {**row_of("a", VECTOR[0]), "token_rewards": [0.0]})
    assert problem(folder) == "rollouts of step 1 could not be read (token_rewards has 1 numbers for 3 tokens in row 0)"


def test_a_table_of_other_types_is_named(folder: Path) -> None:
    table = pa.table({name: ["x"] for name in columns.ROLLOUTS.names})
    pq.write_table(table, folder / "rollouts/step_000001.parquet")
    assert "rollouts of step 1 could not be read" in problem(folder)


def test_without_a_teacher_there_is_no_log_ratio(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": [{"ids": [1, 2], "student": [-1.0, -2.0]}]}, algorithm={"type": "grpo"}, words=WORDS)
    run = read_run(path)
    assert run.step(1).groups[0].rollouts[0].streams.keys() == {"behaviour_logprob", "token_reward", "return", "advantage"}
    assert run.problems == []


def test_a_teacher_may_refuse_a_token_without_a_warning(tmp_path: Path) -> None:
    both = {"ids": [1, 2, 3, 4], "student": [-1.0, -math.inf, -math.inf, -1.0], "teacher": [-math.inf, -1.0, -math.inf, -1.5]}
    run = read_run(write_run(tmp_path / "run", {"a": [both]}))
    expected = [-math.inf, math.inf, math.nan, -0.5]
    assert np.array_equal(run.step(1).groups[0].rollouts[0].streams["log_ratio"], np.float32(expected), equal_nan=True)


def test_a_step_without_rows_or_tokens(folder: Path) -> None:
    rewrite(folder)
    assert read_run(folder).step(1).groups == ()
    empty = {"ids": [], "student": [], "teacher": []}
    write_step(folder, {"a": [empty, VECTOR[0]]})
    run = read_run(folder)
    assert [len(rollout.streams["log_ratio"]) for rollout in run.step(1).groups[0].rollouts] == [0, 3]
    assert run.problems == []


def test_prompts_keep_the_order_of_the_file_and_rows_apart_come_together(folder: Path) -> None:
    rewrite(folder, row_of("b", VECTOR[0]), row_of("a", VECTOR[1]), {**row_of("b", VECTOR[1]), "answer": None, "prompt": "other"})
    groups = read_run(folder).step(1).groups
    assert [(group.index, group.prompt_id, len(group.rollouts)) for group in groups] == [(0, "b", 2), (1, "a", 1)]
    assert [rollout.token_ids for rollout in groups[0].rollouts] == [(9, 14, 1), (7, 1)]
    assert (groups[0].prompt, groups[0].answer) == ("3+4+5=", "12")


def test_updates_belong_to_their_completion(folder: Path) -> None:
    write_updates(
        folder,
        update(3, [1.0, 1.0, 1.0], [False, False, False]),
        update(4, [1.5, 0.5, 1.0], [True, False, False]),
        update(5, [2.0, 3.0], [False, True], prompt_id="b", rollout=1),
    )
    run = read_run(folder)
    first, second = run.step(1).groups
    assert [rollout.update for rollout in (*first.rollouts, *second.rollouts)] == [4, None, None, 5]
    assert first.rollouts[0].streams["importance_ratio"].tolist() == [1.5, 0.5, 1.0]
    assert first.rollouts[0].streams["clipped"].tolist() == [1, 0, 0]
    assert second.rollouts[1].streams["clipped"].tolist() == [0, 1]
    assert "clipped" not in second.rollouts[0].streams
    assert run.problems == []


@pytest.mark.parametrize(
    "broken",
    [
        update(1, None, [False] * 3),
        update(1, [1.0] * 3, None),
        update(1, [1.0] * 3, [False]),
        update(1, [1.0] * 2, [False] * 2),
        update(None, [1.0] * 3, [False] * 3),
    ],
    ids=["no ratios", "no clips", "lengths differ", "other rollouts", "no update"],
)
def test_updates_that_do_not_fit_are_named_and_the_rollouts_stand(folder: Path, broken: dict[str, Any]) -> None:
    write_updates(folder, broken)
    run = read_run(folder)
    assert [group.num_tokens for group in run.step(1).groups] == [5, 5]
    assert run.step(1).groups[0].rollouts[0].streams.keys() == {*COLUMNS, "log_ratio"}
    assert run.step(1).groups[0].rollouts[0].update is None
    [found] = run.problems
    assert found.startswith("importance ratios of step 1 ")


@pytest.mark.parametrize("kind", ["halved", "other columns"])
def test_damaged_updates_are_named_and_the_rollouts_stand(folder: Path, kind: str) -> None:
    write_updates(folder, update(1, [1.0] * 3, [False] * 3))
    if kind == "halved":
        halve(folder / "updates/step_000001.parquet")
    else:
        write_updates(folder, {"a": 1}, schema=pa.schema([("a", pa.int32())]))
    run = read_run(folder)
    assert run.step(1) is not None
    assert len(run.problems) == 1
    assert run.problems[0].startswith("importance ratios of step 1 could not be read (")


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"token_id": [9]}),
        pa.table({"token_id": [9], "text": pa.array([None], pa.binary()), "special": [False]}),
        pa.table({"token_id": pa.array([None], pa.int32()), "text": [b"x"], "special": [False]}),
        pa.table({"token_id": ["a"], "text": [1.5], "special": ["x"]}),
        None,
    ],
    ids=["columns", "no text", "no id", "types", "halved"],
)
def test_a_damaged_vocabulary_counts_as_absent_and_is_named(folder: Path, table: pa.Table | None) -> None:
    if table is None:
        halve(folder / "vocabulary.parquet")
    else:
        pq.write_table(table, folder / "vocabulary.parquet")
    assert read_run(folder).vocabulary() == {}
    assert problem(folder).startswith("vocabulary.parquet could not be read, so tokens are shown by their ids (")


@pytest.mark.parametrize("name", ["alpha=0.1", "token_id=5", "prompt_id=3", "rollout=1", "text=x"])
def test_a_folder_may_be_named_like_a_setting(tmp_path: Path, name: str) -> None:
    """Parquet readers take such names for columns."""
    path = write_run(tmp_path / name, {"a": VECTOR}, words=WORDS)
    write_updates(path, update(1, [1.0] * 3, [False] * 3))
    run = read_run(path)
    assert run.vocabulary() == {token_id: (word, False) for token_id, word in WORDS.items()}
    assert [group.prompt_id for group in run.step(1).groups] == ["a"]
    assert run.step(1).groups[0].rollouts[0].update == 1
    assert run.problems == []


def test_runs_are_named_by_their_folders_as_briefly_as_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x/a", "y/a", "x/b", "u/x/a"):
        write_run(tmp_path / name, {"a": VECTOR})
    runs = {name: read_run(tmp_path / name) for name in ("x/a", "y/a", "x/b", "u/x/a")}
    assert names([runs["x/a"], runs["x/b"]]) == ["a", "b"]
    assert names([runs["x/a"], runs["x/b"], runs["y/a"]]) == ["x/a", "b", "y/a"]
    assert names([runs["x/a"], runs["y/a"], runs["u/x/a"]]) == ["x/a (1)", "y/a", "x/a (3)"]
    assert names([runs["x/a"], runs["x/a"]]) == ["x/a (1)", "x/a (2)"]
    monkeypatch.chdir(tmp_path / "x/a")
    assert names([read_run(Path())]) == ["a"]
    assert names([read_run(".." + os.sep + "b")]) == ["b"]
    assert names([]) == []


def flip(file: Path, where: float = 0.5) -> None:
    """One bit of a file becomes another."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("rollouts/step_000001.parquet", "rollouts of step 1 could not be read (it has changed since it was written"),
        ("updates/step_000001.parquet", "importance ratios of step 1 could not be read (it has changed since"),
        (
            "vocabulary.parquet",
            "vocabulary.parquet could not be read, so tokens are shown by their ids (it has changed",
        ),
        ("environment.json", "environment.json could not be read ("),
        ("summary.json", "summary.json could not be read ("),
        ("probe.json", "probe.json could not be read ("),
        ("config.toml", "config.toml: it has changed since it was written"),
    ],
)
def test_a_flipped_bit_is_named_and_never_shown_as_right(trained: Path, tmp_path: Path, file: str, says: str, where: float):
    shutil.copytree(trained, tmp_path / "run")
    flip(tmp_path / "run" / file, where)
    run = everything(read_run(tmp_path / "run"))
    assert any(problem.startswith(says) for problem in run.problems), run.problems
    if file.startswith("rollouts"):
        assert run.step(1) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl"])
def test_a_changed_number_in_a_line_is_left_out_and_named(trained: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(trained, tmp_path / "run")
    first, *others = (tmp_path / "run" / name).read_text().splitlines(keepends=True)
    value = json.loads(first)
    value["tokens/total" if name == "metrics.jsonl" else "avg_at_k"] = 1
    (tmp_path / "run" / name).write_text(json.dumps(value) + "\n" + "".join(others))
    run = read_run(tmp_path / "run")
    assert f"{name}, line 1 is damaged and was left out" in run.problems
    assert value not in (*run.metrics, *run.evaluations)


def test_steps_that_were_deleted_at_the_end_are_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    first = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "run/metrics.jsonl").write_text(first)
    assert "metrics.jsonl lacks steps 2: curves and totals are without them" in read_run(tmp_path / "run").problems


@pytest.mark.parametrize(("model", "step", "named"), [("teacher", 0, True), ("student", 0, True), ("student", 2, False)])
def test_evaluations_that_were_deleted_are_named(trained: Path, tmp_path: Path, model: str, step: int, named: bool) -> None:
    """But the last one, which is missing from its table."""
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run/evals.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if (json.loads(line)["model"], json.loads(line)["step"]) != (model, step)]
    assert len(kept) < len(lines)
    path.write_text("".join(kept))
    said = f"evals.jsonl lacks the {model} on held_out at steps {step}"
    assert (said in read_run(tmp_path / "run").problems) is named


def test_a_folder_without_digests_is_read_and_not_called_proven(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    assert not read_run(tmp_path / "run").digests.lost
    (tmp_path / "run/digests.jsonl").unlink()
    run = everything(read_run(tmp_path / "run"))
    assert run.digests.lost.startswith("there is no digests.jsonl (an older version wrote this folder")
    assert (run.problems, len(run.metrics)) == ([], 2)
    assert run.notes == [run.digests.lost]
    (tmp_path / "run/digests.jsonl").mkdir()
    assert "cannot be read (digests.jsonl is not a file)" in read_run(tmp_path / "run").digests.lost


def test_what_the_run_wrote_and_is_not_there_is_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    for name in ("environment.json", "summary.json", "probe.json", "updates/step_000002.parquet"):
        (tmp_path / "run" / name).unlink()
    assert read_run(tmp_path / "run").problems == [
        "summary.json is not there, although the run wrote it",
        "updates/step_000002.parquet is not there, although the run wrote it",
        "environment.json is not there, although the run wrote it",
        "probe.json is not there, although the run wrote it",
    ]


@pytest.mark.parametrize("column", ["teacher_logprobs", "advantages", "completion_ids"])
def test_a_stream_that_some_rows_lack_is_damage(folder: Path, column: str) -> None:
    """A run stores a stream for all completions of a step, or for none."""
    write_step(folder, {"a": VECTOR})
    rows = rows_of(folder)
    rows[1][column] = None
    rewrite(folder, *rows)
    run = read_run(folder)
    assert run.step(1) is None
    assert f"{column} is null in row 1" in run.problems[-1]
