"""The run folder is claimed by one run, and never silently by another."""

import json
import os
from pathlib import Path

import pytest
import tomli_w

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.errors import ConfigError
from topd.run.directory import open_run


def open_once(tmp_path: Path, **changes: object) -> None:
    config = config_file.load(tiny_config(tmp_path / "run", **changes))
    with open_run(config) as directory:
        directory.begin(config, "digest", "held-out digest")


def test_a_new_folder_gets_configuration_and_environment(tmp_path: Path) -> None:
    open_once(tmp_path)
    assert config_file.load(tmp_path / "run/config.toml") == config_file.load(tiny_config(tmp_path / "run"))
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["num_cpus"] == os.cpu_count()


def test_a_folder_that_is_not_empty_needs_resume(tmp_path: Path) -> None:
    open_once(tmp_path)
    with pytest.raises(ConfigError, match=r"is not empty.*--run\.resume true"):
        open_once(tmp_path)
    open_once(tmp_path, run__resume=True)


def test_resume_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"no run to resume"):
        open_once(tmp_path, run__resume=True)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == ["thesis.tex"]


def test_resume_refuses_a_changed_configuration_and_names_the_key(tmp_path: Path) -> None:
    open_once(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.alpha was 0.2, is 0.1"):
        open_once(tmp_path, run__resume=True, algorithm__alpha=0.1)


def test_more_steps_are_allowed_unless_the_schedule_depends_on_them(tmp_path: Path) -> None:
    open_once(tmp_path)
    open_once(tmp_path, run__resume=True, run__steps=9)
    other = tmp_path / "other"
    open_once(other, trainer__schedule="cosine")
    with pytest.raises(ConfigError, match=r"run.steps was 2, is 9"):
        open_once(other, trainer__schedule="cosine", run__resume=True, run__steps=9)


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    config = config_file.load(tiny_config(tmp_path / "run"))
    with open_run(config), pytest.raises(ConfigError, match="in use by another process"), open_run(config):
        pass


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        open_once(tmp_path / "file")


def test_a_run_that_never_began_leaves_no_trace(tmp_path: Path) -> None:
    """The corrected command must not be told that the folder is not empty."""
    from topd.cli import main

    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(tiny_config(tmp_path / "run", eval__max_problems=1, run__steps=1)))
    assert main(["train", str(path), "--student.name", "/no/such/folder"]) == 2
    assert not (tmp_path / "run").exists()
    assert main(["train", str(path)]) == 0


def test_what_an_interrupted_write_left_is_removed(tmp_path: Path) -> None:
    open_once(tmp_path)
    leftover = tmp_path / "run/checkpoints/step_000007.partial"
    leftover.mkdir(parents=True)
    (leftover / "policy.safetensors").touch()
    open_once(tmp_path, run__resume=True)
    assert not leftover.exists()


def test_a_kill_while_the_first_file_was_written_leaves_a_folder_that_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml.partial").write_text("[stu")
    open_once(tmp_path, run__resume=True)
    assert (tmp_path / "run/config.toml").is_file()
    assert not (tmp_path / "run/config.toml.partial").exists()


def test_a_foreign_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        open_once(tmp_path)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_other_training_data_are_refused_on_resume(tmp_path: Path) -> None:
    open_once(tmp_path)
    config = config_file.load(tiny_config(tmp_path / "run", run__resume=True))
    with open_run(config) as directory, pytest.raises(ConfigError, match="training problems are not those"):
        directory.begin(config, "another digest", "held-out digest")


@pytest.mark.parametrize("name", ["~nobody-here/run", "a\0b"])
def test_impossible_paths_are_named(tmp_path: Path, name: str) -> None:
    tree = tiny_config(tmp_path)
    tree["run"]["directory"] = name
    with pytest.raises(ConfigError, match="cannot be written"), open_run(config_file.load(tree)):
        pass


SERVED = {"teacher__base_url": ["http://127.0.0.1:8000/v1"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher__base_url": ["http://127.0.0.1:9000/v1", "http://127.0.0.1:9001/v1"]},
        {"teacher__api_key_env": "ANOTHER_KEY"},
        {"teacher__timeout_s": 9.0, "teacher__patience_s": 9.0, "teacher__max_attempts": 9, "teacher__wait_s": 9.0},
        {"teacher__max_concurrent_requests": 9, "teacher__max_dropped_share": 0.9},
        {"eval__teacher": False},
    ],
)
def test_where_the_servers_are_and_how_they_are_asked_may_change(tmp_path: Path, changes: dict[str, object]) -> None:
    open_once(tmp_path, **SERVED)
    open_once(tmp_path, **{**SERVED, **changes}, run__resume=True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"teacher__name": "another"}, "teacher.name"), ({"teacher__map_eos": True}, "teacher.map_eos")],
)
def test_who_the_teacher_is_may_not_change(tmp_path: Path, changes: dict[str, object], key: str) -> None:
    open_once(tmp_path, **SERVED)
    with pytest.raises(ConfigError, match=f"{key} was .*, is "):
        open_once(tmp_path, **{**SERVED, **changes}, run__resume=True)


def test_a_teacher_that_was_loaded_here_does_not_become_a_served_one(tmp_path: Path) -> None:
    open_once(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher\.type was 'local', is 'served'"):
        open_once(tmp_path, **SERVED, run__resume=True)


def test_what_servers_left_before_the_run_began_is_no_run(tmp_path: Path) -> None:
    """Scores of the probe, weights for a hand-over: a process killed before its first step."""
    (tmp_path / "run/handover").mkdir(parents=True)
    for name in ("teacher_scores.sqlite", "teacher_scores.sqlite-wal", ".lock"):
        (tmp_path / "run" / name).touch()
    open_once(tmp_path)


def test_a_start_that_fails_removes_what_servers_left(tmp_path: Path) -> None:
    config = config_file.load(tiny_config(tmp_path / "run"))

    def fail() -> None:
        with open_run(config) as directory:
            (directory.path / "handover").mkdir()
            (directory.path / "teacher_scores.sqlite").touch()
            raise ConfigError("no server")

    with pytest.raises(ConfigError, match="no server"):
        fail()
    assert not (tmp_path / "run").exists()


def test_a_probe_keeps_its_hands_off_a_run_that_is_going_on(tmp_path):
    from topd.run.directory import check_unused

    config = config_file.load(tiny_config(tmp_path / "run"))
    check_unused(config)
    with open_run(config), pytest.raises(ConfigError, match="a run is active"):
        check_unused(config)
    check_unused(config)
