"""The routes: what is read, computed and answered."""

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from topd.serve.answers import Spelling, completion_answer, score_answer, to_json
from topd.serve.guard import Guard, error_response, json_response
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import (
    ApiError,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    parse_json,
    read,
)
from topd.serve.work import Reload, Work, completion_job, encode, score_work, token_ids
from topd.serve.worker import Worker

CLIENT_LEFT = 499
PAUSE_MODES = ("abort", "wait", "keep")

BODY_S = 60.0
"""Seconds in which a body must arrive."""

BODIES_AT_ONCE = 4
"""Bodies of the greatest size that may be in memory before they are read as JSON."""


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
        self.body_bytes = 0

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
                "version": version("topd"),
                "fingerprint": self.worker.fingerprint,
                "vocab_size": self.model.vocab_size,
                "eos_token_ids": list(self.model.eos_token_ids),
                "dtype": str(self.model.module.dtype).removeprefix("torch."),
            },
        }
        return json_response({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        asked = read(TokenizeRequest, await self._body(request))
        self._check_model(asked.model)
        ids = await run_in_threadpool(encode, asked.prompt, self.model, add_special_tokens=asked.add_special_tokens)
        strings = self.model.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        limit = self.model.context_length
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        asked = read(DetokenizeRequest, await self._body(request))
        self._check_model(asked.model)
        ids = token_ids(asked.tokens, self.model, "tokens") if asked.tokens else ()
        decode = functools.partial(self.model.tokenizer.decode, skip_special_tokens=asked.skip_special_tokens)
        return json_response({"prompt": await run_in_threadpool(decode, ids)})

    async def completions(self, request: Request) -> Response:
        asked = read(CompletionRequest, await self._body(request))
        self._check_model(asked.model)
        job = await run_in_threadpool(completion_job, asked, self.model)
        pieces = [piece for prompt in job.sampling for piece in prompt]
        results = iter(await self._run(request, [*([job.scoring] if job.scoring else []), *pieces]))
        scored = next(results) if job.scoring else None
        sampled = [[next(results) for _ in prompt] for prompt in job.sampling]
        name = self.settings.name

        def answer() -> bytes:
            return to_json(completion_answer(job, scored, sampled, model=self.model, name=name, spelling=self.spelling))

        return Response(await run_in_threadpool(answer), media_type="application/json")

    async def score(self, request: Request) -> Response:
        asked = read(ScoreRequest, await self._body(request))
        self._check_model(asked.model)
        work = await run_in_threadpool(score_work, asked, self.model)
        [scored] = await self._run(request, [work])
        body = await run_in_threadpool(score_answer, work, scored, name=self.settings.name)
        headers = {"X-Topd-Fingerprint": scored.fingerprint}
        return Response(body, media_type="application/x-safetensors", headers=headers)

    async def pause(self, request: Request) -> Response:
        _require_json(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ApiError(400, f"mode must be one of {', '.join(PAUSE_MODES)}, found {mode}", param="mode")
        await run_in_threadpool(self.queue.pause, abort=mode == "abort")
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        _require_json(request)
        self.queue.resume()
        return json_response({"status": "resumed"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        _require_json(request)
        return json_response({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        asked = await self._body(request)
        if asked.get("method") != "reload_weights":
            raise ApiError(400, f"method must be reload_weights, found {asked.get('method')}", param="method")
        kwargs = asked.get("kwargs")
        path = kwargs.get("weights_path") if isinstance(kwargs, dict) and len(kwargs) == 1 else None
        if not isinstance(path, str) or not Path(path).is_dir():
            raise ApiError(400, "kwargs must be {weights_path: a folder on the server's machine}", param="kwargs")
        return json_response({"results": await self._run(request, [Reload(folder=Path(path))])})

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

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of the body. Its size is checked while it arrives."""
        limit, size, chunks = self.settings.max_body_bytes, 0, []
        declared = request.headers.get("content-length", "")
        _require_json(request)
        try:
            if declared.isdecimal() and int(declared) > limit:
                raise _too_large(limit)
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    self.body_bytes += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    if self.body_bytes > BODIES_AT_ONCE * limit:
                        raise ApiError(429, "too many large requests at once; send the request again later", retry_after=1)
                    chunks.append(chunk)
            return await run_in_threadpool(parse_json, b"".join(chunks))
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        finally:
            self.body_bytes -= size

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.settings.name):
            raise ApiError(404, f"the model {model} does not exist; this server has {self.settings.name}", param="model")


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
