"""The command itself: its one line, its exit codes, its signals."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from tests.serve.serving import forked_server, served_process, wait_until
from topd.cli import main
from topd.serve.server import bound_socket, url


@pytest.mark.slow
def test_serves_says_so_and_stops_on_sigterm_with_a_request_in_flight():
    options = ("--name", "teacher", "--threads", "1", "--token-env", "MY_TOKEN")
    with served_process("builtin:tiny-teacher", *options, env={"MY_TOKEN": "s3cret"}) as (base, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", base)
        assert httpx2.get(base.replace("/v1", "/health")).status_code == 200
        assert httpx2.get(f"{base}/models").status_code == 401
        client = httpx2.Client(headers={"Authorization": "Bearer s3cret"}, timeout=30)
        answers = []
        request = {"model": "teacher", "prompt": "3+4=", "n": 32, "max_tokens": 250, "temperature": 2, "seed": 1}
        ask = threading.Thread(target=lambda: answers.append(client.post(f"{base}/completions", json=request)))
        ask.start()
        wait_until(lambda: "generated_tokens_total 0.0" not in client.get(base.replace("/v1", "/metrics")).text)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - start < 6
        ask.join()
        client.close()
        assert answers[0].status_code in (200, 503)
        assert process.stdout.read() == ""
        assert process.stderr.read() == "topd: stopped\n"


@pytest.mark.slow
def test_stops_on_sigint_and_the_port_is_free_again_at_once():
    with forked_server() as (base, process):
        port = int(base.rsplit(":", 1)[1].removesuffix("/v1"))
        with httpx2.Client() as kept_open:
            kept_open.get(f"{base}/models")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        with bound_socket("127.0.0.1", port) as bound:
            bound.listen()


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    with forked_server() as (base, process):
        host, port = base.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as slow:  # a body that never comes keeps the server from stopping
            slow.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n")
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(1) == 128 + signal.SIGTERM


def test_other_machines_without_a_token_are_warned_about(monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("topd.serve.server.load", stop)
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        assert main(["serve", "builtin:tiny-teacher", "--host", host, "--port", "0"]) == 130
        assert ("no token is set" in capsys.readouterr().err) == warned
    monkeypatch.setenv("TOPD_SERVE_TOKEN", "s3cret")
    main(["serve", "builtin:tiny-teacher", "--host", "0.0.0.0", "--port", "0"])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["builtin:nothing"], "builtin:tiny-teacher"),
        (["builtin:tiny-teacher", "--port", "70000"], "--port must be between 0 and 65535, found 70000"),
        (["builtin:tiny-teacher", "--max-queue", "0"], "--max-queue must be at least 1, found 0"),
        (["builtin:tiny-teacher", "--max-body-mb", "0"], "--max-body-mb must be greater than 0"),
        (["builtin:tiny-teacher", "--max-tokens-per-microbatch", "0"], "--max-tokens-per-microbatch must be at least 1"),
        (["builtin:tiny-teacher", "--threads", "0"], "--threads must be at least 1"),
        (["builtin:tiny-teacher", "--threads", "100000"], "--threads must be at most"),
        (["builtin:tiny-teacher", "--device", "abacus"], '--device = "abacus" cannot be used'),
        (["builtin:tiny-teacher", "--host", "256.0.0.1"], "--host 256.0.0.1 cannot be resolved"),
        (["builtin:tiny-teacher", "--host", "203.0.113.7"], "cannot be used"),
        (["builtin:tiny-teacher", "--colour", "red"], "does not know '--colour'"),
        (["builtin:tiny-teacher", "--run.seed", "1"], "does not know '--run.seed'"),
    ],
)
def test_what_cannot_be_used_ends_with_two(words, expected, capsys):
    port = [] if "--port" in words else ["--port", "0"]
    assert main(["serve", *words, *port]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("token", ["", "abc\n", "a b"])
def test_a_token_that_no_header_can_hold_is_refused(token, monkeypatch, capsys):
    monkeypatch.setenv("TOPD_SERVE_TOKEN", token)
    assert main(["serve", "builtin:tiny-teacher", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "the token is empty, or holds spaces" in said
    assert not token or token not in said


def test_a_named_token_that_is_not_there_is_refused(monkeypatch, capsys):
    """A typo must not open the server to everybody."""
    monkeypatch.delenv("NOPE", raising=False)
    assert main(["serve", "builtin:tiny-teacher", "--port", "0", "--token-env", "NOPE"]) == 2
    assert "--token-env NOPE: this environment variable is not set" in capsys.readouterr().err


@pytest.mark.parametrize("listens", [True, False])
def test_a_port_in_use_is_found_before_the_model_is_loaded(listens, monkeypatch, capsys):
    monkeypatch.setattr("topd.serve.server.load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with bound_socket("127.0.0.1", 0) as taken:
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "builtin:tiny-teacher", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 cannot be used" in error
    assert "--port" in error


def test_the_help_names_the_routes_and_no_settings(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "/v1/score" in out
    assert "--section.key" not in out


def test_without_the_extra_the_remedy_is_named():
    code = (
        "import sys; sys.modules['uvicorn'] = None; from topd.cli import main; sys.exit(main(['serve', 'builtin:tiny-teacher']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'topd[serve]'" in done.stderr


def test_urls():
    with bound_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert url(bound, "127.0.0.1") == f"http://127.0.0.1:{port}/v1"
        assert url(bound, "::1") == f"http://[::1]:{port}/v1"
