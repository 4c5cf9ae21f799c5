"""`topd report --watch`: the report, served to this machine alone, regenerated when the run has advanced.

Three things are answered: GET / (the page), GET /state (a digest of the folders' files, which the page asks for every few
seconds), and 404. Only requests that name this machine as their host are, so that no page elsewhere can read a run.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from topd.errors import ConfigError, TopdError, first_line
from topd.report.lens import MAX_TOKENS
from topd.report.page import check_steps, read_runs, render
from topd.run.interrupt import Interrupted, interruptible

HOST = "127.0.0.1"
SECONDS = 2.0
"""Interval at which the page asks for changes."""

_SPARE = 4.0
"""Least pause between two pages, in durations of the last one: the run needs the processor more."""

_WATCHED = ("config.toml", "credit.json", "environment.json", "metrics.jsonl", "evals.jsonl", "summary.json")
_WATCHED_FOLDERS = ("rollouts", "updates", "rescores")


def state(paths: Sequence[Path]) -> str:
    """A digest that changes whenever a file does that the report is made from."""
    stamps = []
    for path in paths:
        files = [path / name for name in _WATCHED]
        for folder in _WATCHED_FOLDERS:
            files += sorted((path / folder).glob("*")) if (path / folder).is_dir() else []
        for file in files:
            try:
                seen = file.stat()
                stamps.append(f"{file} {seen.st_mtime_ns} {seen.st_size}")
            except OSError:  # not there yet, or being replaced this moment
                stamps.append(f"{file} -")
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()


class Pages:
    """The newest page of some run folders. Used by several threads."""

    def __init__(self, paths: Sequence[Path], make: Callable[[str], str]) -> None:
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._state = ""
        self._page = ""
        self._next = 0.0

    def get(self) -> tuple[str, str]:
        """(state, page). The page is regenerated if the state has changed and enough time has passed."""
        with self._lock:
            now = state(self._paths)
            if not self._page or (now != self._state and time.monotonic() >= self._next):
                began = time.monotonic()
                try:
                    self._page = self._make(now)
                except (TopdError, OSError):  # half a folder, or none for the moment: what was shown before still stands
                    if not self._page:
                        raise
                self._state = now
                self._next = time.monotonic() + _SPARE * (time.monotonic() - began)
            return self._state, self._page


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            host, _, port = (self.headers.get("Host") or "").partition(":")
            if host not in (HOST, "localhost") or (port or "80") != str(self.connection.getsockname()[1]):
                self._answer(403, "text/plain", "this server answers requests to this machine alone\n")
                return
            path = self.path.partition("?")[0]
            if path not in ("/", "/state"):
                self._answer(404, "text/plain", "there is / and /state\n")
                return
            try:
                state, page = pages.get()
            except (TopdError, OSError) as error:
                self._answer(503, "text/plain", f"{error}\n")
                return
            if path == "/":
                self._answer(200, "text/html", page)
            else:
                self._answer(200, "text/plain", state)

        do_HEAD = do_GET  # noqa: N815 -- the base class names it

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """No-op: a line every two seconds would hide important ones."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves in the middle of an answer is not an error."""


def make_server(
    paths: Sequence[Path | str], *, port: int, max_tokens: int = MAX_TOKENS, steps: Sequence[int] | None = None
) -> ThreadingHTTPServer:
    """A server that is not serving yet. Raises ConfigError for a folder that holds no run, or a port that is taken."""

    runs = read_runs(paths)
    check_steps(runs, steps)
    folders = [run.path for run in runs]

    def make(now: str) -> str:
        return render(read_runs(folders), max_tokens=max_tokens, steps=steps, watch=SECONDS, state=now)

    try:
        return _Server((HOST, port), _handler(Pages(folders, make)))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port} cannot be used: {first_line(error)} Choose another, or 0 for any that is free."
        ) from error


def watch(paths: Sequence[Path | str], *, port: int, max_tokens: int = MAX_TOKENS, steps: Sequence[int] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    with (
        contextlib.suppress(Interrupted),
        interruptible(),
        make_server(paths, port=port, max_tokens=max_tokens, steps=steps) as server,
    ):
        print(f"http://{HOST}:{server.server_address[1]}/ follows {', '.join(map(str, paths))}; Ctrl-C ends it", flush=True)
        server.serve_forever()
