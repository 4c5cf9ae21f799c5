"""`topd report --watch`: a real server, asked by hand, beside folders that change, vanish and come back."""

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.e2e.tiny import tiny_config
from tests.processes import Topd
from tests.report.folders import VECTOR, write_metrics, write_run, write_step, write_updates
from tests.report.folders import update as update_of
from topd.cli import main
from topd.errors import ConfigError
from topd.report import watch
from topd.report.watch import HOST, Pages, make_server, state

Asked = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "run", {"a": VECTOR}, words={9: b"7"})
    write_metrics(path, [{"grade/mean": 0.25}])
    return path


@contextlib.contextmanager
def serving(*paths: Path, **options: Any) -> Iterator[Asked]:
    with make_server(paths, port=0, max_tokens=1000, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = server.server_address[1]

        def ask(path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
            connection = http.client.HTTPConnection(HOST, port, timeout=30)
            try:
                connection.request(method, path, headers={"Host": f"{HOST}:{port}", **headers})
                answer = connection.getresponse()
                return answer.status, dict(answer.headers), answer.read().decode()
            finally:
                connection.close()

        ask.port = port
        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may be made anew at once."""
    monkeypatch.setattr(watch, "_SPARE", 0.0)


def test_the_page_and_its_state_are_served(folder: Path) -> None:
    with serving(folder) as ask:
        status, headers, page = ask()
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        assert int(headers["Content-Length"]) == len(page.encode())
        assert page.startswith("<!doctype html>")
        assert 'data-watch="2.0"' in page
        assert "connect-src &#39;self&#39;" in page
        status, headers, found = ask("/state")
        assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
        assert re.fullmatch(r"[0-9a-f]{64}", found)
        assert ask("/state?x=1")[2] == found
        assert ask("/?now")[2] == page


def test_head_says_what_get_would(folder: Path) -> None:
    with serving(folder) as ask:
        status, headers, body = ask("/", "HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) == len(ask()[2].encode())
        with socket.create_connection((HOST, ask.port), timeout=30) as raw:
            raw.sendall(f"HEAD /state HTTP/1.1\r\nHost: {HOST}:{ask.port}\r\nConnection: close\r\n\r\n".encode())
            assert raw.makefile("rb").read().endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/x", "/state/", "/../etc/passwd", "/config.toml", "/%2e%2e/config.toml"])
def test_nothing_else_is_served(folder: Path, path: str) -> None:
    with serving(folder) as ask:
        status, _, body = ask(path)
        assert (status, body) == (404, "there is / and /state\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_sent(folder: Path, method: str) -> None:
    with serving(folder) as ask:
        assert ask("/", method)[0] == 501


def test_only_this_machine_may_be_named_as_the_host(folder: Path) -> None:
    """A page elsewhere may point its own name at this machine; its requests then carry that name."""
    with serving(folder) as ask:
        port = ask.port
        for host in (
            f"evil.example:{port}",
            "127.0.0.1",
            f"127.0.0.1:{port + 1}",
            "localhost",
            f"127.0.0.1.evil.example:{port}",
            "",
        ):
            for path in ("/", "/state", "/x"):
                status, _, body = ask(path, Host=host)
                assert (status, body) == (403, "this server answers requests to this machine alone\n"), host
        assert ask("/state", Host=f"localhost:{port}")[0] == 200
        assert ask("/", "HEAD", Host="evil.example")[0] == 403


def test_a_request_without_a_host_is_refused(folder: Path) -> None:
    with serving(folder) as ask, socket.create_connection((HOST, ask.port), timeout=30) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert raw.makefile("rb").readline().split()[1] == b"403"


def test_only_this_machine_is_listened_to(folder: Path) -> None:
    with make_server([folder], port=0, max_tokens=1000) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.socket.getsockname()[0] == "127.0.0.1"


def changes(path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "metrics": lambda: write_metrics(path, [{"grade/mean": 0.25}, {"grade/mean": 0.75}]),
        "evaluations": lambda: (path / "evals.jsonl").write_text("{}\n"),
        "summary": lambda: (path / "summary.json").write_text("{}"),
        "environment": lambda: (path / "environment.json").write_text("{}"),
        "configuration": lambda: (path / "config.toml").write_text("[run]\nsteps = 9\n"),
        "rollouts": lambda: write_step(path, {"b": VECTOR}, step=2),
        "updates": lambda: write_updates(path, update_of(1, [1.0] * 3, [False] * 3)),
        "rescores": lambda: ((path / "rescores").mkdir(), (path / "rescores/x.json").write_text("{}")),
        "same size": lambda: os.utime(path / "metrics.jsonl", ns=(1, 1)),
        "rollouts deleted": lambda: (path / "rollouts/step_000001.parquet").unlink(),
    }


@pytest.mark.parametrize("change", list(changes(Path())))
def test_the_state_changes_with_every_file_that_the_page_is_made_of(folder: Path, change: str) -> None:
    before = state([folder])
    assert state([folder]) == before
    changes(folder)[change]()
    after = state([folder])
    assert after != before
    assert state([folder]) == after


def test_the_state_changes_with_nothing_else(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", {"a": VECTOR})
    before = state([folder])
    (folder / "report.html").write_text("x")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/x").write_text("x")
    assert state([folder]) == before
    assert state([folder, other]) not in (before, state([other]), state([other, folder]))


def test_the_page_follows_the_folder(folder: Path, impatient: None) -> None:
    with serving(folder) as ask:
        first, page = ask("/state")[2], ask()[2]
        assert ask("/state")[2] == first
        assert "1 of 2 steps" in page
        write_metrics(folder, [{"grade/mean": 0.25}, {"grade/mean": 0.75}])
        assert ask("/state")[2] != first
        assert "2 of 2 steps" in ask()[2]


def test_a_folder_that_vanishes_keeps_its_page_until_it_is_back(folder: Path, impatient: None, tmp_path: Path) -> None:
    with serving(folder) as ask:
        first, page = ask("/state")[2], ask()[2]
        folder.rename(tmp_path / "away")
        status, _, second = ask("/state")
        assert status == 200
        assert second != first
        assert ask() == (200, ask()[1], page)
        (tmp_path / "away").rename(folder)
        write_metrics(folder, [{"grade/mean": 0.25}, {"grade/mean": 0.5}])
        assert ask("/state")[2] not in (first, second)
        assert "2 of 2 steps" in ask()[2]


def test_a_folder_that_vanishes_before_the_first_page_is_said_to_be_gone(folder: Path) -> None:
    with serving(folder) as ask:
        shutil.rmtree(folder)
        for path in ("/", "/state"):
            status, headers, body = ask(path)
            assert status == 503
            assert headers["Content-Type"].startswith("text/plain")
            assert "there is no run folder" in body
        write_run(folder, {"a": VECTOR})
        assert ask()[0] == 200


@pytest.mark.parametrize("error", [ConfigError("half a folder"), FileNotFoundError("x")])
def test_whatever_a_changing_folder_does_the_last_page_stands(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SPARE", 0.0)
    answers: list[Any] = ["first", error, "third"]

    def make(now: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pages = Pages([folder], make)
    seen = []
    for size in (1, 2, 3):
        write_metrics(folder, [{}] * size)
        seen += [pages.get(), pages.get()]
    assert [page for _, page in seen] == ["first"] * 4 + ["third"] * 2
    assert len({found for found, _ in seen}) == 3


def test_a_page_is_made_anew_at_most_every_so_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 2 seconds: the next is made 8 seconds after it was done at the earliest."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made: list[float] = []

    def make(found: str) -> str:
        assert found == state([folder])
        made.append(now[0])
        now[0] += 2.0
        return f"page {len(made)}"

    pages = Pages([folder], make)
    first = pages.get()
    assert first == (state([folder]), "page 1")
    write_metrics(folder, [{}] * 5)
    for at in (102.0, 105.0, 109.9):
        now[0] = at
        assert pages.get() == first
    now[0] = 110.0
    assert pages.get() == (state([folder]), "page 2")
    now[0] = 500.0
    pages.get()
    assert made == [100.0, 110.0]


def test_many_who_ask_at_once_get_one_page(folder: Path) -> None:
    made: list[int] = []

    def make(now: str) -> str:
        time.sleep(0.05)
        made.append(1)
        return "page"

    pages = Pages([folder], make)
    seen: list[tuple[str, str]] = []
    threads = [threading.Thread(target=lambda: seen.append(pages.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(seen)) == 1


def test_several_runs_and_the_options_reach_the_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_run(tmp_path / "other", {"a": VECTOR})
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: dict[str, Any] = {}

    def render(runs: Any, *, state: str, **options: Any) -> str:
        seen.update(options, runs=[run.path for run in runs])
        return "page"

    monkeypatch.setattr(watch, "render", render)
    with serving("~/run", other, "~/run", steps=[1]) as ask:
        assert ask()[2] == "page"
    assert seen == {"runs": [folder, other], "max_tokens": 1000, "steps": [1], "watch": 2.0}


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_what_is_no_port_is_refused(folder: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
        make_server([folder], port=port, max_tokens=1000)


def test_a_port_that_is_taken_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["report", str(folder), "--watch", "--port", str(port)]) == 2
    captured = capsys.readouterr()
    assert f"topd: --port {port} cannot be used: " in captured.err
    assert "Choose another, or 0" in captured.err
    assert captured.out == ""


@contextlib.contextmanager
def watching(*paths: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, and the address that it says."""
    words = [sys.executable, "-m", "topd", "report", *map(str, paths), "--watch", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.endswith(f" follows {', '.join(map(str, paths))}; Ctrl-C ends it\n")
            yield process, line.split()[0]
        finally:
            process.kill()


def fetched(address: str, path: str = "") -> str:
    host = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request("GET", f"/{path}")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_quietly(folder: Path, number: int) -> None:
    """At once after its line, and with a browser that keeps its connection open."""
    with watching(folder) as (process, address):
        if number == signal.SIGTERM:
            kept = socket.create_connection(address.removeprefix("http://").rstrip("/").split(":"))
            kept.sendall(b"GET /state HTTP/1.1\r\nHost: " + address[7:-1].encode() + b"\r\n\r\n")
            assert b"200" in kept.makefile("rb").readline()
        process.send_signal(number)
        assert process.wait(20) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
        if number == signal.SIGTERM:
            kept.close()


def test_a_signal_before_it_serves_ends_it_quietly_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Between any two lines: here while the line is printed."""

    def interrupted(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("builtins.print", interrupted)
    assert main(["report", str(folder), "--watch", "--port", "0"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_in_training_is_followed_to_its_end(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "run"
    (tmp_path / "config.toml").write_text(tomli_w.dumps(tiny_config(path, run__steps=5, eval__max_problems=1)))
    seen: dict[str, str] = {}
    training = Topd("train", str(tmp_path / "config.toml"))
    try:
        until(lambda: (path / "config.toml").is_file(), training)
        with serving(path) as ask:
            while training.poll() is None:
                state = ask("/state")[2]
                seen[state] = ask()[2]
                time.sleep(0.2)
            assert training.returncode == 0, training.communicate()[0]
            assert "finished after 5 steps" in ask()[2]
    finally:
        training.kill()
        training.communicate()
    steps = [int(found[1]) for page in seen.values() if (found := re.search(r"(\d+) of 5 steps", page))]
    assert len(set(steps)) > 1
    assert steps == sorted(steps)
    assert not [page for page in seen.values() if "could not be read (" in page]


def until(condition: Callable[[], bool], process: Topd | None = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
