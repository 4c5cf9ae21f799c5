"""The routes: what is read, computed and answered."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from topd import __version__
from topd.endpoint.bodies import parsed_bytes
from topd.serve.answers import Spelling, completion_answer, score_answer, to_json
from topd.serve.budget import Budget, Share
from topd.serve.guard import Answer, Guard, error_response, json_response
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import (
    ApiError,
    ApiRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    parse_json,
    read,
)
from topd.serve.work import Reload, Work, completion_job, encode, score_work, scoring_pieces, token_ids
from topd.serve.worker import Worker, joined

T = TypeVar("T")
R = TypeVar("R", bound=ApiRequest)

CLIENT_LEFT = 499
PAUSE_MODES = ("abort", "wait", "keep")

BODY_S = 60.0
"""Seconds in which a body must arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    name: str
    """What clients call the model."""
    max_body_bytes: int
    token: str | None = field(default=None, repr=False)
    allow_reload: bool = False


def create_app(worker: Worker, metrics: ServerMetrics, settings: AppSettings) -> Starlette:
    """The ASGI application around a worker that was started."""
    api = _Api(worker, metrics, settings)
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics_page),
        Route("/v1/models", api.models),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/score", api.score, methods=["POST"]),
    ]
    if settings.allow_reload:
        routes += [
            Route("/pause", api.pause, methods=["POST"]),
            Route("/resume", api.resume, methods=["POST"]),
            Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
            Route("/collective_rpc", api.collective_rpc, methods=["POST"]),
        ]
    guard = Middleware(Guard, token=settings.token, metrics=metrics, paths=frozenset(route.path for route in routes))
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _client_left, Exception: _failure}
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Api:
    def __init__(self, worker: Worker, metrics: ServerMetrics, settings: AppSettings) -> None:
        self.worker = worker
        self.queue = worker.queue
        self.model = worker.model
        self.metrics = metrics
        self.settings = settings
        self.spelling = Spelling(worker.model.tokenizer)
        self.created = int(time.time())
        self.model.tokenizer.encode("0")  # sets truncation and padding once, so that no two threads do
        self.budget = Budget()
        self._lane = CapacityLimiter(1)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.worker.is_alive else 503)

    async def metrics_page(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        card = {
            "id": self.settings.name,
            "object": "model",
            "created": self.created,
            "owned_by": "topd",
            "root": self.model.name,
            "parent": None,
            "max_model_len": self.model.context_length,
            "topd": {
                "version": __version__,
                "fingerprint": self.worker.fingerprint,
                "vocab_size": self.model.vocab_size,
                "eos_token_ids": list(self.model.eos_token_ids),
                "dtype": str(self.model.module.dtype).removeprefix("torch."),
            },
        }
        return json_response({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        async with self._asked(request, TokenizeRequest) as asked:

            def answer() -> bytes:
                ids = encode(asked.prompt, self.model, add_special_tokens=asked.add_special_tokens)
                strings = self.model.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
                limit = self.model.context_length
                return to_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

            return self._answer(await self._aside(answer))

    async def detokenize(self, request: Request) -> Response:
        async with self._asked(request, DetokenizeRequest) as asked:

            def answer() -> bytes:
                ids = token_ids(asked.tokens, self.model, "tokens") if asked.tokens else ()
                return to_json({"prompt": self.model.tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens)})

            return self._answer(await self._aside(answer))

    async def completions(self, request: Request) -> Response:
        async with self._asked(request, CompletionRequest) as asked:
            job = await self._aside(functools.partial(completion_job, asked, self.model))
            scoring = scoring_pieces(job.scoring, self.worker.max_tokens) if job.scoring else []
            results = iter(await self._run(request, [*scoring, *(piece for prompt in job.sampling for piece in prompt)]))
            scored = joined(job.scoring, [next(results) for _ in scoring]) if job.scoring else None
            sampled = [[next(results) for _ in prompt] for prompt in job.sampling]
            name = self.settings.name

            def answer() -> bytes:
                return to_json(completion_answer(job, scored, sampled, model=self.model, name=name, spelling=self.spelling))

            return self._answer(await self._aside(answer))

    async def score(self, request: Request) -> Response:
        async with self._asked(request, ScoreRequest) as asked:
            work = await self._aside(functools.partial(score_work, asked, self.model))
            scored = joined(work, await self._run(request, scoring_pieces(work, self.worker.max_tokens)))
            body = await self._aside(functools.partial(score_answer, work, scored, name=self.settings.name))
            headers = {"X-Topd-Fingerprint": scored.fingerprint}
            return self._answer(body, media_type="application/x-safetensors", headers=headers)

    async def pause(self, request: Request) -> Response:
        _require_json(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ApiError(400, f"mode must be one of {', '.join(PAUSE_MODES)}, found {mode}", param="mode")
        await to_thread.run_sync(functools.partial(self.queue.pause, abort=mode == "abort"))
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        _require_json(request)
        self.queue.resume()
        return json_response({"status": "resumed"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        _require_json(request)
        return json_response({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        with self.budget.share() as share:
            body = await self._body(request, share)
            asked = await self._aside(functools.partial(parse_json, body))
        if asked.get("method") != "reload_weights":
            raise ApiError(400, f"method must be reload_weights, found {asked.get('method')}", param="method")
        kwargs = asked.get("kwargs")
        path = kwargs.get("weights_path") if isinstance(kwargs, dict) and len(kwargs) == 1 else None
        if not isinstance(path, str) or not path or not _is_folder(path):
            raise ApiError(400, "kwargs must be {weights_path: a folder on the server's machine}", param="kwargs")
        return json_response({"results": await self._run(request, [Reload(folder=Path(path))])})

    def _answer(self, body: bytes, *, media_type: str = "application/json", headers: dict[str, str] | None = None) -> Answer:
        return Answer(body, self.budget, media_type=media_type, headers=headers)

    async def _run(self, request: Request, works: Sequence[Work]) -> list[Any]:
        """The results of all work of a request. Work whose client has left is withdrawn."""
        tasks = self.queue.submit(works)
        results: asyncio.Future[list[Any]] = asyncio.gather(*(asyncio.wrap_future(task.future) for task in tasks))
        results.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio complains of it unread
        left: asyncio.Future[Any] = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({results, left}, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ClientDisconnect
            found = results.result()
        finally:
            results.cancel()
            left.cancel()
            self.queue.withdraw(tasks)
        if len({result.fingerprint for result in found if result is not None}) > 1:
            raise ApiError(503, "the weights changed while this request ran; send it again", retry_after=1)
        return found

    @contextlib.asynccontextmanager
    async def _asked(self, request: Request, kind: type[R]) -> AsyncIterator[R]:
        """The request in the body. The memory it takes counts until it is answered."""
        with self.budget.share() as share:
            asked = await self._read(request, kind, share)
            self._check_model(asked.model)
            yield asked

    async def _read(self, request: Request, kind: type[R], share: Share) -> R:
        body = await self._body(request, share)
        return await self._aside(lambda: read(kind, parse_json(body)))

    async def _body(self, request: Request, share: Share) -> bytearray:
        """The body. Its size is checked while it arrives, and then what it takes as Python objects."""
        limit, body = self.settings.max_body_bytes, bytearray()
        declared = request.headers.get("content-length", "")
        _require_json(request)
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    share.set(share.num_bytes + len(chunk))
                    if share.num_bytes > limit:
                        raise _too_large(limit)
                    body += chunk
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        share.set(await self._aside(functools.partial(parsed_bytes, body)))
        return body

    async def _aside(self, function: Callable[[], T]) -> T:
        """What `function` returns, in a thread. One at a time: what one needs in between is in memory once."""
        return await to_thread.run_sync(function, limiter=self._lane)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.settings.name):
            raise ApiError(404, f"the model {model} does not exist; this server has {self.settings.name}", param="model")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, a loop of links, no text
        return False


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _require_json(request: Request) -> None:
    """No foreign web page can send that type unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "the Content-Type must be application/json")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit / 1e6:g} MB; split the request")


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Unknown path, wrong method."""
    response = error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _client_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _failure(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, and uvicorn logs it."""
    return error_response(ApiError(500, "the server failed on this request; its log says why"))
