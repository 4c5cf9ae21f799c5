"""What changed on disk since it was written is refused by name, and never trained on."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.e2e.tiny import tiny_config
from tests.fakes import scored_groups, without_teacher
from tests.run.test_rollouts_read import credit_of
from topd import config_file
from topd.assemble import assemble, make_trainer
from topd.collect.feed import Feed
from topd.errors import ConfigError
from topd.models.load import load
from topd.run import checkpoint, columns, rollouts, vocabulary
from topd.run.digests import Digests
from topd.run.directory import RunDirectory, open_run
from topd.run.summary import gaps
from topd.trainer.batch import flatten

FILES = ("policy.safetensors", "optimizer.safetensors", "reports.safetensors", "state.json", checkpoint.MARKER)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory):
    return make_trainer(assemble(config_file.load(tiny_config(tmp_path_factory.mktemp("trainer") / "run"))))


@pytest.fixture
def saved(tmp_path: Path, trainer) -> Path:
    """The newer of two checkpoints."""
    checkpoint.save(tmp_path, trainer, steps_done=1, keep=5)
    return checkpoint.save(tmp_path, trainer, steps_done=2, keep=5)


def flip(file: Path, where: float) -> None:
    """One bit of a file becomes another."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_refused(saved: Path, trainer, file: str, where: float) -> None:
    flip(saved / file, where)
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.trainable().items()}
    with pytest.raises(
        ConfigError, match=r"step_000002 is damaged.*Delete that folder to continue from step_000001, which is undamaged"
    ):
        checkpoint.restore(saved, trainer)
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.policy.trainable().items())


def test_what_is_missing_added_or_edited_in_a_checkpoint_is_named(saved: Path, trainer) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"policy_version": 7}))
    with pytest.raises(ConfigError, match=r"state\.json: it has changed since it was written \(its SHA-256 begins with"):
        checkpoint.restore(saved, trainer)
    (saved / "optimizer.safetensors").rename(saved / "moved")
    with pytest.raises(ConfigError, match=r"moved was added later"):
        checkpoint.restore(saved, trainer)
    (saved / "moved").unlink()
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors is missing"):
        checkpoint.restore(saved, trainer)
    shutil.rmtree(saved.parent / "step_000001")
    with pytest.raises(ConfigError, match=r"No undamaged one precedes it. Delete that folder, and the run restarts"):
        checkpoint.restore(saved, trainer)


def test_an_older_versions_checkpoint_is_read_but_not_called_proven(saved: Path, trainer) -> None:
    assert checkpoint.is_proven(saved)
    (saved / checkpoint.MARKER).write_text("")
    with pytest.raises(ConfigError, match="COMPLETE is empty, but held digests"):
        checkpoint.restore(saved, trainer)
    state = json.loads((saved / "state.json").read_text())
    del state["digests"]
    (saved / "state.json").write_text(json.dumps(state))
    assert not checkpoint.is_proven(saved)
    assert checkpoint.restore(saved, trainer) == 2


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def groups():
    return scored_groups((3, 2), (1, 4))


@pytest.fixture
def step(directory: RunDirectory, groups) -> Path:
    """The stored rollouts of step 1."""
    path = directory.rollouts(1)
    rollouts.write(path, groups, flatten(groups), credit_of(groups), directory.digests.note)
    return path


def stored(directory: RunDirectory, groups) -> tuple[object, list[str]]:
    """What a run that goes on takes from the folder, and the lines that it shows."""
    lines: list[str] = []
    feed = SimpleNamespace(directory=RunDirectory(directory.path), display=SimpleNamespace(line=lines.append))
    return Feed._stored(feed, 1, [scored.group.prompt for scored in groups]), lines


def test_whole_rollouts_are_taken_without_a_word(directory: RunDirectory, step: Path, groups) -> None:
    taken, lines = stored(directory, groups)
    assert (len(taken), lines) == (2, [])


@pytest.mark.parametrize("where", [0.01, 0.3, 0.6, 0.99])
def test_a_flipped_bit_in_stored_rollouts_is_refused(directory: RunDirectory, step: Path, groups, where: float) -> None:
    flip(step, where)
    with pytest.raises(
        ConfigError,
        match=r"step_000001\.parquet is damaged: it has changed since it was written.*Delete it: the step is then sampled",
    ):
        stored(directory, groups)


def test_missing_groups_are_refused(directory: RunDirectory, step: Path, groups) -> None:
    pq.write_table(pq.read_table(step).slice(2), step, compression="zstd")
    with pytest.raises(ConfigError, match="has changed since it was written"):
        stored(directory, groups)


def test_rollouts_of_an_older_version_are_taken_with_a_warning(directory: RunDirectory, step: Path, groups) -> None:
    directory.digests.path.unlink()
    taken, [line] = stored(directory, groups)
    assert len(taken) == 2
    assert line.startswith(f"WARNING  {step} has no digest")


def change(path: Path, column: str, row: int, value: object) -> None:
    rows = pq.read_table(path).to_pylist()
    rows[row][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=columns.ROLLOUTS), path)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("teacher_logprobs", None, "teacher_logprobs is null in row 1"),
        ("teacher_logprobs", [-1.0, None], "1 numbers are null"),
        ("teacher_logprobs", [-1.0, float("nan")], "teacher_logprobs holds a NaN in row 1"),
        ("old_logprobs", None, "old_logprobs is null in row 1"),
        ("behaviour_logprobs", [-1.0], "behaviour_logprobs has 1 numbers for 2 tokens in row 1"),
        ("grade", None, "grade is null in row 1"),
        ("completion_ids", None, "null in row 1"),
        ("prompt_id", None, "prompt_id is null in row 1"),
        ("prompt_ids", [9, 9, 9], "does not hold this step's prompts"),
    ],
)
def test_without_digests_what_no_run_writes_is_refused(
    directory: RunDirectory, step: Path, groups, column: str, value: object, says: str
) -> None:
    change(step, column, 1, value)
    with pytest.raises(ConfigError, match=f"{says}.*Delete it: the step is then sampled again"):
        rollouts.read(step, [scored.group.prompt for scored in groups])


def test_a_column_that_is_not_there_is_named(step: Path, groups) -> None:
    pq.write_table(pq.read_table(step).drop_columns(["old_logprobs"]), step)
    with pytest.raises(ConfigError, match="there is no column old_logprobs"):
        rollouts.read(step, [scored.group.prompt for scored in groups])


def test_rollouts_without_a_teacher_have_none(tmp_path: Path, groups) -> None:
    untaught = [dataclasses.replace(scored, evidence=without_teacher(scored.evidence)) for scored in groups]
    rollouts.write(tmp_path / "s.parquet", untaught, flatten(untaught), credit_of(untaught))
    change(tmp_path / "s.parquet", "teacher_logprobs", 0, None)
    read = rollouts.read(tmp_path / "s.parquet", [g.group.prompt for g in groups])
    assert not any("teacher_logprobs" in scored.evidence for scored in read)


ENTRIES = [(0, b"a", False), (1, b"\xff", True)]


def test_a_truncated_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.parquet"
    vocabulary.write(path, ENTRIES)
    vocabulary.write(path, ENTRIES)
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(ConfigError, match=r"it holds 1 entries, the student's tokenizer 2.*delete that file: it is regenerated"):
        vocabulary.write(path, ENTRIES)
    path.write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"vocabulary.parquet is damaged"):
        vocabulary.write(path, ENTRIES)


@pytest.mark.parametrize("text", ["", '{"data_sha256": "di', "[1, 2]", "null", '"text"', "[" * 100_000, "\xff"])
def test_a_damaged_environment_is_named_on_resume(tmp_path: Path, text: str) -> None:
    def begin(**changes: object) -> None:
        config = config_file.load(tiny_config(tmp_path / "run", **changes))
        with open_run(config) as folder:
            folder.begin(config, "digest", "held-out digest")

    begin()
    begin(run__resume=True)
    for with_digests in (True, False):
        if not with_digests:
            (tmp_path / "run/digests.jsonl").unlink()
        (tmp_path / "run/environment.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"environment.json is damaged: .*Restore it; or delete"):
            begin(run__resume=True)
    (tmp_path / "run/environment.json").unlink()
    begin(run__resume=True)


def record(directory: RunDirectory, steps: int) -> None:
    for number in range(1, steps + 1):
        directory.add_metrics({"step": number, "tokens/total": 10 * number, "loss": 1e-7 * number})
    for number in (0, 2, 4):
        directory.add_evaluation({"model": "student", "benchmark": "held_out", "step": number, "avg_at_k": 0.5})


@pytest.mark.parametrize("log", ["metrics", "evals"])
def test_a_line_that_nobody_wrote_is_named(directory: RunDirectory, log: str) -> None:
    record(directory, 4)
    path = directory.path / f"{log}.jsonl"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(ConfigError, match=rf"{log}\.jsonl, line 2 is damaged \(the run did not write this line\)"):
        RunDirectory(directory.path).forget_after(4)


def test_steps_and_evaluations_that_were_deleted_are_named(directory: RunDirectory) -> None:
    config = config_file.load(tiny_config(directory.path, run__steps=4, eval__every_steps=2, eval__teacher=False))
    record(directory, 4)
    assert gaps(config, directory, 4, ["held_out"]) == []
    for log, keep in (("metrics", [0, 3]), ("evals", [2])):
        lines = (directory.path / f"{log}.jsonl").read_text().splitlines(keepends=True)
        (directory.path / f"{log}.jsonl").write_text("".join(lines[i] for i in keep))
    assert gaps(config, directory, 4, ["held_out"]) == [
        "metrics.jsonl lacks steps 2 to 3: curves and totals are without them",
        "evals.jsonl lacks the student on held_out at steps 0, 2",
    ]
    with_teacher = config_file.load(tiny_config(directory.path, run__steps=4))
    assert gaps(with_teacher, directory, 4, ["held_out"])[1:] == [
        "evals.jsonl lacks the student on held_out at steps 0",
        "evals.jsonl lacks the teacher on held_out at steps 0",
    ]


@pytest.mark.parametrize("log", ["metrics", "evals"])
def test_a_line_that_is_there_twice_counts_once(directory: RunDirectory, log: str) -> None:
    record(directory, 4)
    path = directory.path / f"{log}.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole.splitlines(keepends=True)[1])
    RunDirectory(directory.path).forget_after(4)
    assert path.read_text() == whole


def test_steps_that_were_forgotten_and_made_again_are_whole(directory: RunDirectory) -> None:
    """Also where the last digest was cut off by a kill, and in a folder of an older version."""
    record(directory, 4)
    directory.forget_after(2)
    with directory.digests.path.open("a") as file:
        file.write('{"file": "metr')
    again = RunDirectory(directory.path)
    again.digests.begin(again.metrics_log, again.evals_log)
    again.add_metrics({"step": 3, "other": 1})
    assert [row["step"] for row in RunDirectory(directory.path).metrics()] == [1, 2, 3]
    directory.digests.path.unlink()
    old = RunDirectory(directory.path)
    old.digests.begin(old.metrics_log, old.evals_log)
    old.add_metrics({"step": 4})
    assert [row["step"] for row in RunDirectory(directory.path).metrics()] == [1, 2, 3, 4]


def test_a_file_is_known_before_it_appears(directory: RunDirectory) -> None:
    """A kill between the two leaves the old file, which is still whole."""
    directory.write_summary({"a": 1})
    written = directory.path / "next"
    written.write_text("other")
    directory.digests.note(directory.path / "summary.json", written)
    assert Digests(directory.path).difference(directory.path / "summary.json") == ""


def test_a_flipped_bit_in_a_runs_model_is_refused_where_it_is_loaded(directory: RunDirectory, model_folder) -> None:
    shutil.move(model_folder(), directory.model)
    directory.digests.note(directory.model, directory.model)
    assert load(str(directory.model), dtype="float32", device=torch.device("cpu"), role="student").vocab_size
    flip(directory.model / "model.safetensors", 0.9)
    with pytest.raises(
        ConfigError, match=r'student\.name = ".*" is damaged: model\.safetensors: it has changed since it was written'
    ):
        load(str(directory.model), dtype="float32", device=torch.device("cpu"), role="student")


def test_a_resumed_run_says_what_is_not_there(tmp_path: Path) -> None:
    def begin(**changes: object) -> list[str]:
        config = config_file.load(tiny_config(tmp_path / "run", **changes))
        with open_run(config) as folder:
            return folder.begin(config, "digest", "held-out digest")

    assert begin() == begin(run__resume=True) == []
    for name in ("digests.jsonl", "environment.json"):
        (tmp_path / "run" / name).unlink()
    digests, data = begin(run__resume=True)
    assert digests.startswith("there is no digests.jsonl (an older version wrote this folder, or it was lost)")
    assert data == "environment.json is missing: that the data are unchanged is not proven"
    assert begin(run__resume=True) == []
    (tmp_path / "run/config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"config\.toml is damaged: it has changed since it was written"):
        begin(run__resume=True)


def test_a_folder_in_the_place_of_a_log_is_named_before_anything_is_trained(directory: RunDirectory) -> None:
    directory.metrics_log.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: metrics.jsonl is not a file"):
        directory.forget_after(0)


def test_a_run_that_goes_on_while_it_is_read_is_not_called_damaged(directory: RunDirectory) -> None:
    """The reader's digests are older than the last line and file."""
    record(directory, 1)
    directory.write_summary({"a": 1})
    reader = Digests(directory.path)
    directory.add_metrics({"step": 2})
    directory.write_summary({"a": 2})
    assert [row["step"] for row in reader.lines(directory.metrics_log)] == [1, 2]
    assert reader.difference(directory.path / "summary.json") == ""


@pytest.mark.parametrize("where", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_flipped_bit_in_the_digests_blames_no_file(directory: RunDirectory, where: float) -> None:
    record(directory, 4)
    directory.write_summary({"a": 1})
    flip(directory.digests.path, where)
    again = RunDirectory(directory.path)
    assert "digests.jsonl has 1 damaged lines" in again.digests.lost or "digests.jsonl has 2 damaged lines" in again.digests.lost
    again.digests.begin(again.metrics_log, again.evals_log)
    again.forget_after(4)
    assert again.digests.difference(again.path / "summary.json") == ""
    assert RunDirectory(directory.path).digests.lost == ""
    assert len(RunDirectory(directory.path).metrics()) == 4


@pytest.mark.parametrize("log", ["metrics", "evals"])
def test_lines_that_have_changed_places_are_refused(directory: RunDirectory, log: str) -> None:
    record(directory, 4)
    path = directory.path / f"{log}.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rest, first]))
    with pytest.raises(ConfigError, match=rf"{log}\.jsonl: step \d comes after step \d, so lines were moved"):
        getattr(RunDirectory(directory.path), "metrics" if log == "metrics" else "evaluations")()
