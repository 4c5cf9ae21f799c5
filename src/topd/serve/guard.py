"""Around every route: the token, the time, the status; and the shape of an answer."""

import asyncio
import hmac
import time
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topd.serve.answers import to_json
from topd.serve.budget import Budget
from topd.serve.connection import DROP
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import ApiError

PIECE = 1 << 16
"""Bytes of an answer that are handed to the connection at once; it takes the next when the client has read most of them."""

ANSWER_S, BYTES_PER_S = 60.0, 100_000
"""Seconds in which an answer must have been read, beside one for every so many bytes."""


class Answer(Response):
    """A body that may be large. It counts in the budget until the client has read it."""

    def __init__(self, body: bytes, budget: Budget, *, media_type: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(body, media_type=media_type, headers=headers)
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError, 413 or 429, if there is no room for it."""
        body = memoryview(self.body)
        with self.budget.share() as share:
            share.set(len(body))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(body), PIECE):
                await send({"type": "http.response.body", "body": bytes(body[start : start + PIECE]), "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, headers=headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        headers["Connection"] = "close"
    return json_response(error.body(), error.status, headers)


def _seconds_to_read(start: Message) -> float:
    """How long a client may take to read the answer that begins so."""
    size = next((int(value) for key, value in start["headers"] if key == b"content-length"), 0)
    return ANSWER_S + size / BYTES_PER_S


class Guard:
    """ASGI middleware. /health needs no token; paths that are no route are counted together.

    The connection of a client that does not read its answer in time is closed.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self.app = app
        self.expected = None if token is None else token.encode()
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["path"] if scope["path"] in self.paths else "other"
        status, start = 500, time.perf_counter()
        deadline: float | None = None

        async def watch(message: Message) -> None:
            nonlocal status, deadline
            if message["type"] == "http.response.start":
                status = message["status"]
                deadline = asyncio.get_running_loop().time() + _seconds_to_read(message)
            try:
                async with asyncio.timeout_at(deadline):
                    await send(message)
            except TimeoutError:
                scope["extensions"][DROP]["call"]()

        try:
            if self._may_pass(scope):
                await self.app(scope, receive, watch)
            else:
                error = ApiError(401, "the Authorization header must be: Bearer TOKEN, with this server's token")
                await error_response(error)(scope, receive, watch)
        except asyncio.CancelledError:  # uvicorn ends what did not end in time
            if deadline is None:
                await error_response(ApiError(503, "the server is shutting down"))(scope, receive, watch)
        finally:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)

    def _may_pass(self, scope: Scope) -> bool:
        if self.expected is None or scope["path"] == "/health":
            return True
        given = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self.expected)
