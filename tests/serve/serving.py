"""A running server for tests: in this process, or as the real command. Used by other tests too."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.processes import Topd

START_SECONDS = 60


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    """Returns once `holds()`; fails after that time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


@functools.cache
def _loaded(name: str) -> Any:
    from topd.models.load import load

    return load(name, dtype="float32", device=torch.device("cpu"), role="model")


@contextlib.contextmanager
def serving(model: Any = "builtin:tiny-teacher", **options: Any) -> Iterator[str]:
    """The base URL of a server in a thread of this process, `http://127.0.0.1:PORT/v1`.

    `model` is a name or a LanguageModel; `options` are those of ServeOptions. With allow_reload a named model is loaded anew,
    as its weights may be replaced.
    """
    with running(model, **options) as (base, _):
        yield base


@contextlib.contextmanager
def running(model: Any = "builtin:tiny-teacher", **options: Any) -> Iterator[tuple[str, Any]]:
    """The same, with the server object."""
    from topd.serve.server import ServeOptions, Server, bound_socket, url

    name = model if isinstance(model, str) else model.name
    if isinstance(model, str):
        model = _loaded.__wrapped__(model) if options.get("allow_reload") else _loaded(model)
    ready = threading.Event()
    with bound_socket("127.0.0.1", 0) as bound:
        server = Server(model, ServeOptions(**{"model": name, "port": 0, **options}), on_ready=lambda line: ready.set())
        thread = threading.Thread(target=server.run, args=([bound],), name="serving")
        thread.start()
        try:
            assert ready.wait(START_SECONDS), "the server did not start"
            yield url(bound, "127.0.0.1"), server
        finally:
            server.should_exit = True
            thread.join()
    assert server.stop_worker(), "the worker did not stop"


@contextlib.contextmanager
def served_process(
    model: str = "builtin:tiny-teacher", *args: str, env: dict[str, str] | None = None
) -> Iterator[tuple[str, Any]]:
    """`topd serve MODEL --port 0 ARGS` as a process of its own: its base URL and the Popen. Stopped with SIGTERM at the end."""
    command = [sys.executable, "-m", "topd", "serve", model, "--port", "0", *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving "), line + process.stderr.read()
            yield line.split(" on ")[1].split()[0], process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextlib.contextmanager
def forked_server(model: str = "builtin:tiny-teacher", *args: str) -> Iterator[tuple[str, Topd]]:
    """The same without the seconds of imports (tests/processes.py): killed at the end, and both outputs are in `stdout`."""
    process = Topd("serve", model, "--port", "0", *args)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), line + process.stdout.read()
        yield line.split(" on ")[1].split()[0], process
    finally:
        process.kill()
        process.communicate()
