"""`topd serve`: sockets, signals, and the order of starting and stopping."""

import gc
import ipaddress
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvicorn

from topd.config import Dtype
from topd.errors import ConfigError
from topd.models.device import pick_device, set_threads
from topd.models.language_model import LanguageModel
from topd.models.load import load
from topd.serve.app import AppSettings, create_app
from topd.serve.connection import KEEP_ALIVE_S, Connection
from topd.serve.metrics import ServerMetrics
from topd.serve.worker import Worker

GRACE_SECONDS = 3.0
"""What runs when the server is told to stop may go on for so long."""

BACKLOG = 128
"""Connections that the system holds until they are taken, all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `topd serve`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free one."""
    name: str | None = None
    """What clients call the model; None: as `model`."""
    dtype: Dtype = "float32"
    device: str = "auto"
    threads: int | None = None
    max_queue: int = 256
    """Requests that may wait."""
    max_tokens_per_microbatch: int = 16384
    max_body_mb: float = 32.0
    token: str | None = field(default=None, repr=False)
    allow_reload: bool = False
    batch_invariant: bool = False
    """Compute every request alone, so that its answer never depends, in the last bits, on who else asks."""


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Raises ConfigError for what cannot be used, before the model is loaded."""
    _check(options)
    with bound_socket(options.host, options.port) as bound:
        if options.token is None and not _is_loopback(bound):
            print(f"topd: warning: {options.host} can be reached from other machines and no token is set", file=sys.stderr)
        device = pick_device(options.device, key="--device")
        set_threads(options.threads, key="--threads")
        model = load(options.model, dtype=options.dtype, device=device, role="model")
        gc.freeze()  # else a body of a million lists makes the collector go through the libraries again and again
        server = Server(model, options, on_ready=lambda line: print(line, flush=True))
        with _signals(server):
            server.run([bound])
    ended = server.stop_worker()
    print("topd: stopped", file=sys.stderr, flush=True)
    if not ended:  # the interpreter must not be taken apart under a thread that computes
        os._exit(0)
    return 0


class Server(uvicorn.Server):
    """The application, its worker, and uvicorn around them."""

    def __init__(self, model: LanguageModel, options: ServeOptions, *, on_ready: Callable[[str], None]) -> None:
        self.name = options.name or options.model
        self.options = options
        self.on_ready = on_ready
        metrics = ServerMetrics()
        self.worker = Worker(
            model,
            metrics,
            max_queue=options.max_queue,
            max_tokens=options.max_tokens_per_microbatch,
            alone=options.batch_invariant,
        )
        settings = AppSettings(
            name=self.name,
            max_body_bytes=int(options.max_body_mb * 1e6),
            token=options.token,
            allow_reload=options.allow_reload,
        )
        super().__init__(
            uvicorn.Config(
                create_app(self.worker, metrics, settings),
                http=Connection,
                backlog=BACKLOG,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(GRACE_SECONDS) + 1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at the end; a clean stop is no death by signal. See `_signals`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.start()
        [bound] = sockets or []
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now, see bound_socket
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _unusable(self.options.host, self.options.port, error) from error
        device, dtype = self.worker.model.device, self.options.dtype
        self.on_ready(f"serving {self.name} on {url(bound, self.options.host)} ({dtype}, {device.type})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.queue.close(GRACE_SECONDS)
        await super().shutdown(sockets)

    def stop_worker(self) -> bool:
        """Whether the worker's thread has ended."""
        self.worker.queue.close(0.0)
        return self.worker.join(1.0)


def url(bound: socket.socket, host: str) -> str:
    """The base URL of clients."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}/v1"


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound and does not listen yet. Raises ConfigError for a port in use, or an address that is not ours.

    Without SO_REUSEADDR nobody else can bind the port while the model is loaded. With it, and if the server before had it, a
    port can be bound on which closed connections linger.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error}. Give an address of this machine.") from error
    with socket.socket(family, kind, protocol) as bound:
        try:
            bound.bind(address)
        except OSError:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(address)
            except OSError as error:
                raise _unusable(host, port, error) from error
        yield bound


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"port {port} of {host} cannot be used: {error.strerror}. Stop what uses it, give another --port (or --host, if that "
        "is not this machine), or --port 0 for a free one."
    )


def _is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def _check(options: ServeOptions) -> None:
    rules = (
        ("--port", options.port, 0 <= options.port <= 65535, "between 0 and 65535"),
        ("--max-queue", options.max_queue, options.max_queue >= 1, "at least 1"),
        ("--max-tokens-per-microbatch", options.max_tokens_per_microbatch, options.max_tokens_per_microbatch >= 1, "at least 1"),
        ("--max-body-mb", options.max_body_mb, options.max_body_mb > 0, "greater than 0"),
        ("--threads", options.threads, options.threads is None or options.threads >= 1, "at least 1"),
    )
    for key, value, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{key} must be {rule}, found {value}.")
    if options.token is not None and not re.fullmatch(r"[!-~]+", options.token):
        raise ConfigError(
            "the token is empty, or holds spaces, line breaks or other characters that no HTTP header can hold. Set another, or "
            "unset its environment variable."
        )


@contextmanager
def _signals(server: Server) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server cleanly; a second one ends the process at once."""

    def stop(signum: int, frame: FrameType | None) -> None:
        if server.should_exit:
            os._exit(128 + signum)
        server.should_exit = True

    before: dict[Any, Any] = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
