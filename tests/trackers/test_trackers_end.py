"""How the end of a run waits for its trackers: bounded, and with the words of an end. The trackers here are fakes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.trackers.test_trackers import installer
from tests.trackers.tracking import CONFIG, FAKE, calls, fake, make_folder, row, summary
from topd import trackers
from topd.errors import RunStopped
from topd.trackers import Trackers, feeder


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "my-run")


@pytest.fixture
def install(tmp_path, monkeypatch):
    return installer(tmp_path, monkeypatch)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of(folder: Path, name: str = "wandb") -> int:
    file = folder / "trackers" / name / "pid"
    deadline = time.monotonic() + 30
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize("method", ["__init__", "log", "finish"])
def test_a_tracker_that_hangs_delays_nothing_but_the_bounded_end(method, folder, install, monkeypatch):
    monkeypatch.setattr(trackers, "FLUSH_S", 1.0)
    monkeypatch.setattr(trackers, "SILENT_S", 0.2)
    install(wandb=fake(method, "time.sleep(600)"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        began = time.monotonic()
        for step in range(100):
            tracked.step(row(step))
        assert time.monotonic() - began < 5
        if method != "__init__":
            pid_of(folder)
        (process,) = [feeding._process for feeding in tracked._feeders]
        ended = time.monotonic()
    assert time.monotonic() - ended < 20
    assert len(lines) == 2
    assert "waiting" in lines[0]
    assert ("it never answered" if method == "__init__" else "it was not done 1 s after the end") in lines[1]
    assert process is None or process.poll() is not None


def test_a_put_never_waits_for_a_full_queue(folder, monkeypatch):
    monkeypatch.setattr(feeder, "QUEUE_SIZE", 3)
    full = feeder.Feeder("wandb", [])  # its thread is never started, so nothing is taken out
    loop = threading.Thread(target=lambda: [full.put({"row": row(step)}) for step in range(10)], daemon=True)
    loop.start()
    loop.join(2.0)
    assert not loop.is_alive()
    assert full.failure == "it is 3 messages behind"


def test_a_full_queue_switches_the_tracker_off(folder, install, monkeypatch):
    monkeypatch.setattr(feeder, "QUEUE_SIZE", 3)
    install(wandb=fake("log", "time.sleep(600)"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        began = time.monotonic()
        for step in range(10):
            tracked.step(row(step))
        assert time.monotonic() - began < 5
        assert len(lines) == 1
        assert "3 messages behind" in lines[0]
    assert len(lines) == 1


def put_until(lines: list[str], tracked: Trackers) -> None:
    deadline = time.monotonic() + 30
    while not lines:
        tracked.step(row(1))
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_tracker_that_never_answers_is_told_of_during_the_run_and_given_up_early(folder, install, monkeypatch):
    monkeypatch.setattr(trackers, "ANSWER_S", 0.3)
    monkeypatch.setattr(trackers, "UNANSWERED_S", 0.5)
    install(wandb=fake("__init__", "time.sleep(600)"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        put_until(lines, tracked)
        tracked.step(row(2))
        assert lines == ["tracker wandb has not answered for 0 s; training goes on"]
        ended = time.monotonic()
    assert 0.5 <= time.monotonic() - ended < 20  # not FLUSH_S
    assert lines[1:] == [
        f"tracker wandb is off: it never answered. {folder} holds everything; "
        "the same command with --run.resume true brings the tracker up to date."
    ]


def test_a_tracker_that_has_just_begun_is_given_time_to_answer(folder, install, monkeypatch):
    monkeypatch.setattr(trackers, "UNANSWERED_S", 0.0)
    install(wandb=fake("__init__", "time.sleep(0.5)"))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
    assert lines == []
    assert calls(folder)[-1] == ["finish", "finished"]


@pytest.mark.parametrize(
    ("hangs", "rest"), [("finish", ""), ("summarise", ""), ("log", "; to send the rest: the same command with --run.resume true")]
)
def test_the_last_words_name_the_command_that_sends_what_was_kept(hangs, rest, folder, install, monkeypatch):
    monkeypatch.setattr(trackers, "FLUSH_S", 1.0)
    install(wandb=fake(hangs, "time.sleep(600)").replace("run_id =", 'by_hand = "wandb sync HERE"\n    run_id ='))
    lines: list[str] = []
    with Trackers(["wandb"], folder, CONFIG, lines.append) as tracked:
        tracked.open(0)
        tracked.step(row(1))
        tracked.finish(summary(1))
        if hangs == "log":
            pid_of(folder)
    assert lines == [f"tracker wandb is off: it was not done 1 s after the end. To send what it kept: wandb sync HERE{rest}"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "stopped"), (RunStopped, "stopped"), (ZeroDivisionError, "failed")]
)
def test_the_status_says_how_the_run_ended(error, status, folder, install):
    install(wandb=FAKE)
    with pytest.raises(error), Trackers(["wandb"], folder, CONFIG, print) as tracked:
        tracked.open(0)
        raise error
    assert calls(folder)[-1] == ["finish", status]


def test_an_impatient_ctrl_c_ends_the_wait_and_the_process(folder, install, monkeypatch):
    install(wandb=fake("log", "time.sleep(600)"))
    monkeypatch.setattr(feeder.Feeder, "join", lambda self, timeout: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), Trackers(["wandb"], folder, CONFIG, print) as tracked:
        tracked.open(0)
        tracked.step(row(1))
        pid = pid_of(folder)
    monkeypatch.undo()
    tracked._feeders[0].join(10)
    assert not is_alive(pid)


SCRIPT = """
import sys, time
from pathlib import Path
from tests.trackers.tracking import CONFIG, row
from topd import trackers
from topd.trackers import feeder, Trackers
feeder.MODULES = "fake_trackers"
trackers.FLUSH_S = trackers.SILENT_S = 0.5
with Trackers(["wandb"], Path(sys.argv[1]), CONFIG, print) as tracked:
    tracked.open(0)
    tracked.step(row(1))
    {}
"""


def run_script(folder: Path, tail: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder.parent), *filter(None, sys.path)])}
    words = [sys.executable, "-c", SCRIPT.format(tail), str(folder)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_process_with_a_hung_tracker_ends_promptly(folder, install):
    install(wandb=fake("log", "time.sleep(600)"))
    process = run_script(folder, "pass")
    pid = pid_of(folder)
    began = time.monotonic()
    said = process.communicate(timeout=20)[0]
    assert process.returncode == 0
    assert time.monotonic() - began < 5
    assert "tracker wandb is off" in said
    assert not is_alive(pid)


def test_a_tracker_finishes_by_itself_when_the_run_is_killed(folder, install):
    install(wandb=FAKE)
    process = run_script(folder, "time.sleep(600)")
    pid = pid_of(folder)
    while len(calls(folder)) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert calls(folder)[-1] == ["finish", "failed"]
