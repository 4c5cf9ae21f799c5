"""A fault-injecting HTTP proxy on loopback, in front of a real `topd serve`. It speaks as the server of any dialect.

A fault is a coroutine function: it gets the exchange and gives the reply, or None to reset the connection. What a schedule gives
to the n-th request of a kind (score, sample, models, text, control) is done to it; where it gives None, the request is forwarded.
"""

import asyncio
import contextlib
import email.utils
import itertools
import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx2
import torch
from safetensors.torch import load, save

PASSED_ON = ("content-type", "retry-after", "www-authenticate", "x-topd-fingerprint")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body) if self.body else {}

    @property
    def kind(self) -> str:
        path = self.path.partition("?")[0]
        if path in ("/v1/score", "/generate"):
            return "score"
        if path == "/v1/completions":
            return "score" if self.json.get("echo") or "prompt_logprobs" in self.json else "sample"
        return {"/v1/models": "models", "/detokenize": "text", "/tokenize": "text"}.get(path, "control")


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def with_json(self, content: Any) -> "Reply":
        return replace(self, body=json.dumps(content).encode(), headers={**self.headers, "content-type": "application/json"})

    def encoded(self) -> bytes:
        headers = {**self.headers, "content-length": str(len(self.body))}
        lines = [f"HTTP/1.1 {self.status} Said", *(f"{key}: {value}" for key, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@dataclass(frozen=True)
class Exchange:
    proxy: "FaultProxy"
    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def forward(self) -> Reply:
        """The reply of the server behind, in the words of the proxy's dialect."""
        return await self.proxy.speak(self.request)


Fault = Callable[[Exchange], Awaitable[Reply | None]]
Schedule = Callable[[int], Fault | None]


def first(count: int, fault: Fault) -> Schedule:
    return lambda number: fault if number < count else None


def always(fault: Fault) -> Schedule:
    return lambda number: fault


def two_of_three(*faults: Fault) -> Schedule:
    """Each fault once, with a healthy reply after every second one: no circuit opens."""

    def schedule(number: int) -> Fault | None:
        place = 2 * (number // 3) + number % 3
        return faults[place] if number % 3 < 2 and place < len(faults) else None

    return schedule


class FaultProxy:
    """`url` is the base URL of clients. All state may be set from any thread."""

    def __init__(self, upstream: str, dialect: str) -> None:
        self.upstream = upstream.removesuffix("/v1")
        self.dialect = DIALECTS[dialect]()
        self.schedules: dict[str, Schedule] = {}
        self.seen: Counter[str] = Counter()
        """Requests by kind, since the kind's schedule was set."""
        self.given: list[str] = []
        """Names of the faults that were given, in order."""
        self.requests: list[Request] = []
        self.open = 0
        self.most_open = 0
        """Scoring requests in flight at the same time."""
        self.connections: set[asyncio.StreamWriter] = set()

    def give(self, schedule: Schedule | None, kind: str = "score") -> None:
        """From now on; the count begins anew. None: all is well."""
        self.seen[kind] = 0
        self.schedules.pop(kind, None)
        if schedule is not None:
            self.schedules[kind] = schedule

    async def speak(self, request: Request) -> Reply:
        return await self.dialect.reply(self, request)

    async def ask(self, request: Request) -> Reply:
        """The real server's reply."""
        headers = {key: request.headers[key] for key in ("authorization", "content-type") if key in request.headers}
        url = self.upstream + request.path
        try:
            response = await self._client.request(request.method, url, headers=headers, content=request.body)
        except httpx2.TransportError:
            raise ConnectionError from None
        return Reply(response.status_code, response.content, {k: v for k, v in response.headers.items() if k in PASSED_ON})

    async def scores(self, request: Request, groups: list[dict[str, Any]]) -> tuple[Reply, list[float]]:
        """For servers that exist in imitation only: the numbers of the real server, for groups of token ids."""
        body = json.dumps({"groups": groups, "temperature": 1.0}).encode()
        reply = await self.ask(replace(request, path="/v1/score", body=body))
        return reply, load(reply.body)["logprobs"].tolist() if reply.status == 200 else []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while request := await _read_request(reader):
                reply = await self._reply(request, reader, writer)
                if reply is None:
                    reset(writer)
                    return
                writer.write(reply.encoded())
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):  # cancelled: the proxy is stopping
            reset(writer)
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _reply(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply | None:
        kind = request.kind
        number = self.seen[kind]
        self.seen[kind] += 1
        self.requests.append(request)
        schedule = self.schedules.get(kind)
        fault = schedule(number) if schedule else None
        if fault is not None:
            self.given.append(fault.__name__)
        self.open += kind == "score"
        self.most_open = max(self.most_open, self.open)
        try:
            exchange = Exchange(self, request, reader, writer)
            return await (fault(exchange) if fault else exchange.forward())
        finally:
            self.open -= kind == "score"

    def run(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._main(ready))

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with httpx2.AsyncClient(timeout=60, trust_env=False, verify=False) as self._client:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            ready.set()
            await self._stop.wait()
            server.close()
            await asyncio.sleep(0.01)  # a handler that is cancelled before it began would leave its connection open
            for writer in list(self.connections):
                reset(writer)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


@contextlib.contextmanager
def proxying(upstream: str, dialect: str = "topd") -> Iterator[FaultProxy]:
    """A running proxy. `dialect`: topd, vllm, echo or sglang."""
    proxy, ready = FaultProxy(upstream, dialect), threading.Event()
    thread = threading.Thread(target=proxy.run, args=(ready,), name="proxy")
    thread.start()
    try:
        assert ready.wait(10)
        yield proxy
    finally:
        proxy.stop()
        thread.join()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (one.partition(":") for one in rest if one)}
    method, path, _ = line.split(" ")
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a killed process does."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def named(name: str, fault: Fault) -> Fault:
    fault.__name__ = name
    return fault


# faults of the connection


async def stall(exchange: Exchange) -> None:
    """Never answer; the client has to leave."""
    await exchange.reader.read(1)


async def reset_before_headers(exchange: Exchange) -> None:
    return None


async def reset_after_headers(exchange: Exchange) -> None:
    whole = (await exchange.forward()).encoded()
    exchange.writer.write(whole[: whole.index(b"\r\n\r\n") + 4])
    await exchange.writer.drain()
    await asyncio.sleep(0.05)


async def cut_off(exchange: Exchange) -> None:
    """Half of the body of a reply that promised all of it."""
    whole = (await exchange.forward()).encoded()
    exchange.writer.write(whole[: (whole.index(b"\r\n\r\n") + len(whole)) // 2])
    await exchange.writer.drain()
    await asyncio.sleep(0.05)


def delay(seconds: float) -> Fault:
    async def fault(exchange: Exchange) -> Reply:
        await asyncio.sleep(seconds)
        return await exchange.forward()

    return named(f"delay of {seconds:g} s", fault)


def restart(upstream: str, *, drop: bool) -> Fault:
    """From this request on another server is behind the URL."""

    async def fault(exchange: Exchange) -> Reply | None:
        exchange.proxy.upstream = upstream.removesuffix("/v1")
        return None if drop else await exchange.forward()

    return named("restart with a reset" if drop else "restart unnoticed", fault)


# faults of the status


def status(code: int, *, body: str = '{"error": {"message": "no"}}', **headers: str) -> Fault:
    async def fault(exchange: Exchange) -> Reply:
        shown = {key.replace("_", "-"): value for key, value in headers.items()}
        return Reply(code, body.encode(), {"content-type": "application/json", **shown})

    return named(" ".join([f"status {code}", *headers]), fault)


def busy_until(seconds: float) -> Fault:
    """429 with an HTTP date."""

    async def fault(exchange: Exchange) -> Reply:
        return Reply(429, b"{}", {"retry-after": email.utils.formatdate(time.time() + seconds, usegmt=True)})

    return named("status 429 with a date", fault)


async def echo_headers(exchange: Exchange) -> Reply:
    """A gateway's error page that shows the request, key and all."""
    shown = "\n".join(f"{key}: {value}" for key, value in exchange.request.headers.items())
    return Reply(502, f"<html><pre>{shown}</pre></html>".encode(), {"content-type": "text/html"})


# faults of the body


async def html(exchange: Exchange) -> Reply:
    return Reply(200, b"<!doctype html><title>Log in</title>", {"content-type": "text/html"})


async def empty(exchange: Exchange) -> Reply:
    return Reply(200, b"")


async def truncated(exchange: Exchange) -> Reply:
    """Half a body in a reply that is whole."""
    reply = await exchange.forward()
    return replace(reply, body=reply.body[: len(reply.body) // 2])


def edited(name: str, edit: Callable[[list[list[list[Any]]]], None]) -> Fault:
    """Change the rows of a scoring reply: per row its entries [token id, log-prob]."""

    async def fault(exchange: Exchange) -> Reply:
        dialect, reply = exchange.proxy.dialect, await exchange.forward()
        assert reply.status == 200, reply.body
        rows = dialect.rows(exchange.request, reply)
        edit(rows)
        return dialect.with_rows(exchange.request, reply, rows)

    return named(name, fault)


def value(found: float | None) -> Callable[[list[list[list[Any]]]], None]:
    """For the last token of the first row."""

    def edit(rows: list[list[list[Any]]]) -> None:
        rows[0][-1][1] = found

    return edit


def _other_token(rows: list[list[list[Any]]]) -> None:
    rows[0][-1][0] = 3 if rows[0][-1][0] != 3 else 4


def _other_order(rows: list[list[list[Any]]]) -> None:
    """The last token that differs from the one before it changes places with that."""
    row = rows[0]
    k = next(k for k in reversed(range(1, len(row))) if row[k][0] != row[k - 1][0])
    row[k - 1], row[k] = row[k], row[k - 1]


def _swap_rows(rows: list[list[list[Any]]]) -> None:
    i = next(i for i in range(1, len(rows)) if rows[i] != rows[0])
    rows[0], rows[i] = rows[i], rows[0]


NUMBERS = {
    "nan": value(math.nan),
    "minus infinity": value(-math.inf),
    "above zero": value(0.5),
    "one too few": lambda rows: rows[0].pop(),
    "one too many": lambda rows: rows[0].append(list(rows[0][-1])),
}
"""Edits that every dialect can express."""

IDS = {"other token": _other_token, "other order": _other_order, "rows swapped": _swap_rows}
"""Edits of dialects whose answers name the tokens."""

NULL = {"none": value(None)}
"""Edits of dialects in JSON."""

ROWS = {"a row too few": lambda rows: rows.pop(), "a row too many": lambda rows: rows.append(list(rows[0]))}
"""Edits of dialects that answer row by row."""


async def same_index_twice(exchange: Exchange) -> Reply:
    reply = await exchange.forward()
    answer = reply.json
    for choice in answer["choices"]:
        choice["index"] = 0
    return reply.with_json(answer)


# dialects


class Topd:
    """As it comes."""

    edits = NUMBERS | IDS

    async def reply(self, proxy: FaultProxy, request: Request) -> Reply:
        return await proxy.ask(request)

    def rows(self, request: Request, reply: Reply) -> list[list[list[Any]]]:
        tensors = load(reply.body)
        entries = [list(pair) for pair in zip(tensors["token_ids"].tolist(), tensors["logprobs"].tolist(), strict=True)]
        lengths = [len(c) for group in request.json["groups"] for c in group["completions"]]
        left = iter(entries)
        return [list(itertools.islice(left, length)) for length in lengths]

    def with_rows(self, request: Request, reply: Reply, rows: list[list[list[Any]]]) -> Reply:
        ids, logprobs = zip(*(entry for row in rows for entry in row), strict=True)
        return replace(reply, body=save({"token_ids": torch.tensor(ids), "logprobs": torch.tensor(logprobs)}))


class _Foreign:
    """A server that knows nothing of topd. `routes` answer themselves, `hidden` have that status; the rest is passed on."""

    owner = "vllm"
    hidden: ClassVar[Mapping[str, int]] = {"/v1/score": 404, "/generate": 404}

    async def reply(self, proxy: FaultProxy, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if path in self.hidden:
            return Reply(self.hidden[path], b'{"error": {"message": "not here"}}')
        own = getattr(self, "_" + path.strip("/").replace("/", "_"), None)
        return await (own(proxy, request) if own else proxy.ask(request))

    async def _v1_models(self, proxy: FaultProxy, request: Request) -> Reply:
        reply = await proxy.ask(request)
        if reply.status != 200:
            return reply
        cards = [{k: v for k, v in card.items() if k != "topd"} | {"owned_by": self.owner} for card in reply.json["data"]]
        return reply.with_json({"object": "list", "data": cards})


class Vllm(_Foreign):
    edits = NUMBERS | IDS | NULL | ROWS

    def rows(self, request: Request, reply: Reply) -> list[list[list[Any]]]:
        return [[self._entry(position) for position in choice["prompt_logprobs"]] for choice in reply.json["choices"]]

    @staticmethod
    def _entry(position: dict[str, Any] | None) -> list[Any]:
        """The first position holds nothing."""
        if position is None:
            return [None, None]
        [(token, found)] = position.items()
        return [int(token), found["logprob"]]

    def with_rows(self, request: Request, reply: Reply, rows: list[list[list[Any]]]) -> Reply:
        def position(token: int | None, logprob: float | None) -> dict[str, Any] | None:
            return None if token is None else {str(token): {"logprob": logprob, "rank": 1, "decoded_token": "x"}}

        choices = [{"index": i, "prompt_logprobs": [position(*entry) for entry in row]} for i, row in enumerate(rows)]
        return reply.with_json({**reply.json, "choices": choices})


class Echo(_Foreign):
    """A server without prompt_logprobs."""

    edits = NUMBERS | IDS | NULL | ROWS

    async def _v1_completions(self, proxy: FaultProxy, request: Request) -> Reply:
        if "prompt_logprobs" in request.json:
            return Reply(400, b'{"error": {"message": "prompt_logprobs is not supported"}}')
        return await proxy.ask(request)

    def rows(self, request: Request, reply: Reply) -> list[list[list[Any]]]:
        found = [choice["logprobs"] for choice in reply.json["choices"]]
        pairs = [zip(each["tokens"], each["token_logprobs"], strict=True) for each in found]
        return [[[int(token.removeprefix("token_id:")), logprob] for token, logprob in row] for row in pairs]

    def with_rows(self, request: Request, reply: Reply, rows: list[list[list[Any]]]) -> Reply:
        logprobs = [{"tokens": [f"token_id:{t}" for t, _ in row], "token_logprobs": [x for _, x in row]} for row in rows]
        return reply.with_json({**reply.json, "choices": [{"index": i, "logprobs": each} for i, each in enumerate(logprobs)]})


class Sglang(_Foreign):
    """`/generate`, imitated."""

    edits = NUMBERS | IDS | NULL | ROWS
    owner = "sglang"
    hidden: ClassVar[Mapping[str, int]] = {"/v1/score": 400}

    async def _generate(self, proxy: FaultProxy, request: Request) -> Reply:
        asked = request.json
        assert asked["return_logprob"] is True
        assert asked["return_text_in_logprobs"] is False
        pairs = list(zip(asked["input_ids"], asked["logprob_start_len"], strict=True))
        groups = [{"prompt": row[: start + 1], "completions": [row[start + 1 :]]} for row, start in pairs]
        reply, flat = await proxy.scores(request, groups)
        if reply.status != 200:
            return reply
        numbers = iter(flat)
        answers = []
        for row, start in pairs:
            entries = [[None, row[start], None], *([next(numbers), token, None] for token in row[start + 1 :])]
            meta = {"id": "0", "prompt_tokens": len(row), "input_token_logprobs": entries, "finish_reason": {"type": "length"}}
            answers.append({"text": "", "output_ids": [3], "meta_info": meta})
        return reply.with_json(answers)

    async def _v1_completions(self, proxy: FaultProxy, request: Request) -> Reply:
        if request.kind == "score":
            return Reply(400, b'{"message": "not supported"}')
        return await proxy.ask(request)

    async def _detokenize(self, proxy: FaultProxy, request: Request) -> Reply:
        reply = await proxy.ask(request)
        return reply.with_json({"text": reply.json["prompt"]}) if reply.status == 200 else reply

    def rows(self, request: Request, reply: Reply) -> list[list[list[Any]]]:
        """Without the first entry, which has no log-prob."""
        found = [answer["meta_info"]["input_token_logprobs"][1:] for answer in reply.json]
        return [[[token, logprob] for logprob, token, _ in row] for row in found]

    def with_rows(self, request: Request, reply: Reply, rows: list[list[list[Any]]]) -> Reply:
        entries = [[[None, 0, None], *([logprob, token, None] for token, logprob in row)] for row in rows]
        return reply.with_json([{"text": "", "meta_info": {"input_token_logprobs": each}} for each in entries])


DIALECTS = {"topd": Topd, "vllm": Vllm, "echo": Echo, "sglang": Sglang}
