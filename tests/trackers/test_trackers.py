"""Whatever a tracker does, the run goes on, one line says so, and no process is left. The trackers here are fakes."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

from tests.e2e.tiny import tiny_config
from tests.trackers.tracking import CONFIG, FAKE, append, calls, evaluation, fake, make_folder, row, summary
from topd import config_file, trackers
from topd.api import train
from topd.config import RunConfig
from topd.errors import ConfigError
from topd.trackers import Trackers, check_installed, feeder
from topd.trackers.feeder import without_secrets


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "my-run")


@pytest.fixture
def install(tmp_path, monkeypatch):
    return installer(tmp_path, monkeypatch)


def installer(tmp_path, monkeypatch):
    """(wandb=source, ...): these sources are the trackers from now on."""

    def write(**sources: str) -> None:
        package = tmp_path / "fake_trackers"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        for name, source in sources.items():
            (package / f"{name}.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(feeder, "MODULES", "fake_trackers")
    return write


def test_a_tracker_gets_rows_evaluations_and_the_end(folder, install):
    install(wandb=FAKE)
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        tracked.evaluation(evaluation(0))
        tracked.step(row(1))
        tracked.finish(summary(1))
    opened, evaluated, logged, summarised, finished = calls(folder)
    assert opened == ["open", 0, None, 0, "my-run", 7]
    prefix = "eval/held_out/student"
    assert evaluated[:2] == ["log", 0]
    assert evaluated[2] == {
        f"{prefix}/avg_at_k": 0.5,
        f"{prefix}/ci95_low": 0.25,
        f"{prefix}/ci95_high": 0.75,
        f"{prefix}/k": 2,
        f"{prefix}/problems": 4,
        f"{prefix}/pass_at_2": 0.5,
        f"{prefix}/pass_at_2_ci95_low": 0.25,
        f"{prefix}/pass_at_2_ci95_high": 0.75,
    }
    assert logged == ["log", 1, {"step": 1, "train/loss": 1.5, "seconds/step": 1.0}]  # null is left out
    assert summarised[2] == {
        "final/steps": 1,
        "final/tokens": 12,
        "final/held_out/base/avg_at_k": 0.5,
        "final/held_out/base/ci95_low": 0.25,
        "final/held_out/base/ci95_high": 0.75,
        "final/held_out/student/avg_at_k": 0.75,
        "final/held_out/student/ci95_low": 0.5,
        "final/held_out/student/ci95_high": 1.0,
    }
    assert summarised[4] == [["held_out", "base", 4, 2, 0.5, 0.25, 0.75], ["held_out", "student", 4, 2, 0.75, 0.5, 1.0]]
    assert finished == ["finish", "finished"]
    assert lines == []


FAULTS = {
    "raises": ("raise OSError(28, 'No space left on device')", "No space left on device"),
    "exits": ("sys.exit('no key')", "no key"),
    "crashes": ("os._exit(3)", "exit code 3"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
}


@pytest.mark.parametrize("method", ["__init__", "log", "finish"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_line_and_the_other_tracker_goes_on(method, fault, folder, install, capfd):
    code, said = FAULTS[fault]
    install(wandb=fake(method, code), mlflow=FAKE)
    lines: list[str] = []
    with Trackers(["wandb", "mlflow"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        for step in (1, 2, 3):
            tracked.step(row(step))
        tracked.finish(summary(3))
    assert len(lines) == 1
    assert "wandb" in lines[0]
    assert said in lines[0]
    assert "--run.resume true" in lines[0] or "Training goes on; a resumed run brings it up to date" in lines[0]
    assert "Errno" not in lines[0]
    assert "\n" not in lines[0]
    assert [call[0] for call in calls(folder, "mlflow")] == ["open", "log", "log", "log", "summarise", "finish"]
    assert capfd.readouterr() == ("", "")


def test_a_tracker_that_fails_in_the_middle_is_told_of_during_the_run(folder, install):
    install(wandb=fake("log", "raise ValueError('broken')"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        deadline = time.monotonic() + 30
        while not lines:
            tracked.step(row(1))
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tracked.step(row(2))
    assert lines == ["tracker wandb is off: ValueError: broken. Training goes on; a resumed run brings it up to date."]


def test_a_file_in_the_place_of_the_folder_costs_one_plain_line(folder, install):
    install(wandb=FAKE)
    (folder / "trackers").touch()
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
    assert lines == [
        f"tracker wandb is off: Not a directory: {folder / 'trackers' / 'wandb'}. "
        f"{folder} holds everything; the same command with --run.resume true brings the tracker up to date."
    ]


def test_nothing_that_a_tracker_prints_and_no_secret_is_shown(folder, install, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key")
    shout = "print(os.environ['WANDB_API_KEY'], flush=True); os.system('echo banner; echo banner >&2')"
    fail = "raise ValueError('key ' + os.environ['WANDB_API_KEY'] + ' for https://me:pass@host/x refused')"
    install(wandb=fake("log", shout, "import warnings; warnings.warn('old')", fail))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        tracked.step(row(1))
    (line,) = lines
    assert line.startswith("tracker wandb is off: ValueError: key *** for https://***@host/x refused. ")
    assert capfd.readouterr() == ("", "")


def test_a_question_of_a_tracker_gets_no_answer(folder, install):
    install(wandb=fake("log", "input('key? ')"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        tracked.step(row(1))
    assert "EOFError" in lines[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("bad key 0123456789abcdef0123456789abcdef01234567 given", "bad key *** given"),
        ("at https://user:word@host/a", "at https://***@host/a"),
        ("first\nsecond", "first"),
        ("No space left on device.", "No space left on device"),
        ("word " * 100 + ".", "word " * 39 + "word [...]"),
    ],
)
def test_secrets_are_cut_out(text, shown):
    assert without_secrets(text) == shown


def track(folder: Path, steps_done: int, steps: int) -> None:
    """What a run does from steps_done on."""
    with Trackers(["wandb"], folder, CONFIG, print) as tracked:
        tracked.open(steps_done)
        for step in range(steps_done + 1, steps + 1):
            tracked.step(append(folder / "metrics.jsonl", row(step)))
        tracked.evaluation(append(folder / "evals.jsonl", evaluation(steps)))
        tracked.finish(summary(steps))


def forget_after(folder: Path, step: int) -> None:
    for name in ("metrics.jsonl", "evals.jsonl"):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))


def test_a_resumed_run_goes_on_in_the_same_tracker_run_without_repeats(folder, install):
    install(wandb=FAKE)
    track(folder, 0, 3)
    forget_after(folder, 2)
    track(folder, 2, 4)
    found = calls(folder)
    assert [call for call in found if call[0] == "open"][1][:4] == ["open", 2, "run-1", 5]
    assert [call[1] for call in found if call[0] == "log" and "step" in call[2]] == [1, 2, 3, 4]
    assert [call[1] for call in found if call[0] == "log" and "step" not in call[2]] == [3, 4]
    track(folder, 4, 4)  # resumed when all was done
    assert [call[1] for call in calls(folder) if call[0] == "summarise"] == [3, 4]


def test_a_tracker_that_can_rewind_gets_the_steps_that_are_done_again(folder, install):
    install(wandb=FAKE.replace("run_id =", "REWINDS = True\n    run_id ="))
    track(folder, 0, 3)
    forget_after(folder, 2)
    track(folder, 2, 4)
    assert [call[1] for call in calls(folder) if call[0] == "log" and "step" in call[2]] == [1, 2, 3, 3, 4]


def test_a_tracker_that_is_new_or_was_off_is_brought_up_to_date(folder, install):
    install(wandb=fake("log", "assert step < 2"))
    track(folder, 0, 3)
    install(wandb=FAKE)
    track(folder, 3, 4)
    assert [call[1] for call in calls(folder) if call[0] == "log" and "step" in call[2]] == [1, 2, 3, 4]


def test_another_store_is_another_run(folder, install, monkeypatch):
    install(wandb=FAKE)
    track(folder, 0, 2)
    monkeypatch.setenv("FAKE_WHERE", "elsewhere")
    track(folder, 2, 3)
    assert [call[2] for call in calls(folder) if call[0] == "open"] == [None, None]
    assert [call[1] for call in calls(folder) if call[0] == "log" and "step" in call[2]] == [1, 2, 1, 2, 3]


def test_a_row_costs_the_training_loop_microseconds(folder, monkeypatch):
    monkeypatch.setattr(feeder.Feeder, "start", lambda self: None)
    tracked = Trackers(["wandb", "mlflow"], folder, CONFIG, print)
    tracked.open(0)
    content = row(1, **{f"name/{i}": float(i) for i in range(60)})
    began = time.perf_counter()
    for _ in range(900):
        tracked.step(content)
    assert (time.perf_counter() - began) / 900 < 5e-3


def test_a_package_that_is_missing_is_told_before_anything_is_spent(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(ConfigError, match=r"run.trackers: \"wandb\" .* pip install 'topd\[wandb\]'"):
        train(tiny_config(tmp_path / "run", run__trackers=["mlflow", "wandb"]))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "not_installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(trackers.PACKAGES, "wandb", ("not_installed",))
    with pytest.raises(ConfigError, match="not installed"):
        check_installed(["wandb"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["wandb", "wandb"], "run.trackers must name each tracker once; found 'wandb' twice. Remove one."),
        (["neptune"], "found 'neptune'"),
        ("wandb", "run.trackers must be a valid list; found 'wandb'"),
    ],
)
def test_the_key_is_strict(value, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        config_file.load(tiny_config(tmp_path, run__trackers=value))
    assert said in str(caught.value)


def test_the_trackers_may_change_on_resume():
    assert "trackers" in RunConfig.MAY_CHANGE
