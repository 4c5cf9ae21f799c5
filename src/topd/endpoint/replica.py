"""One server: its connection, its load, and its health."""

import asyncio
import contextlib
import email.utils
import ipaddress
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from topd.config_parts import server_root
from topd.endpoint.bodies import parsed_bytes
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, Refused, Unavailable

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 0.1, 60.0
"""Seconds; bounds of the wait that a server may request."""

CONNECT_S = 10.0
"""Time limit for opening a connection."""

MAX_ANSWER = 4_000_000
"""Bytes of any answer, besides those of its tokens."""

ANSWER_PER_TOKEN = 1000
"""Bytes allowed per token in any dialect; vLLM's mapping, the longest, takes about 100."""

MAX_ERROR = 8192
"""Bytes read of an error page."""

MAX_PARSED, PARSED_SHARE = 300_000_000, 1.5
"""Limit of an answer's memory as Python objects: a constant, and a multiple of its allowed bytes of JSON."""

LARGE = 1 << 18
"""Bytes from which an answer's memory is estimated in a thread, not in the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request: the path below the server's root, and a JSON body for a POST."""

    path: str
    json: dict[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    num_tokens: int = 0
    """Largest number of tokens in the answer; bounds its length."""

    @property
    def max_bytes(self) -> int:
        """Longest answer accepted."""
        return MAX_ANSWER + ANSWER_PER_TOKEN * self.num_tokens


class Replica:
    """One server of a pool. `url` is its root, without /v1."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = server_root(url)
        self.timeout_s = timeout_s
        self.outstanding = 0
        self.failures = 0
        """Consecutive failures."""
        self.fault: Fault | None = None
        """Reason why it is unhealthy; while set, only health checks are sent."""
        self.not_before = 0.0
        """On `time.monotonic`: no requests before this time, as the server wishes."""
        self.busy: Busy | None = None
        """The answer that set `not_before`."""
        self.is_another_model = False
        """The last health check met another model."""
        self._api_key = api_key
        headers = {"Accept-Encoding": "identity"}  # the length of a compressed answer is unknown until it is unpacked
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=limits,
            trust_env=not is_loopback(self.url),
        )

    @property
    def trusted(self) -> bool:
        return self.fault is None

    async def send(self, request: Request, *, timeout_s: float | None = None) -> httpx2.Response:
        """Response of status 200 and bounded length. Raises Unavailable, Busy, Refused, Forbidden or BadAnswer."""
        seconds = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(seconds):
                response = await self._exchange(request)
        except TimeoutError:
            raise Unavailable(f"{self.url} did not answer within {seconds:g} s") from None
        except httpx2.TransportError as error:
            raise Unavailable(f"{self.url}: {_text(error)}") from None
        except Fault:
            raise
        except Exception as error:  # foreign headers can fail anywhere in the HTTP library, in any way
            raise BadAnswer(f"{self.url}: unreadable answer ({_text(error)})") from None
        if response.status_code == 200:
            return response
        raise self._fault(response)

    async def _exchange(self, request: Request) -> httpx2.Response:
        """Response with its body; the body of an error page is cut."""
        async with self._client.stream(request.method, request.path, json=request.json) as response:
            if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise BadAnswer(f"{self.url}: the answer is compressed, although Accept-Encoding is identity")
            is_error, body = response.status_code != 200, bytearray()
            limit = MAX_ERROR if is_error else request.max_bytes
            async for chunk in response.aiter_raw():
                body += chunk[: limit + 1 - len(body)]
                if len(body) > limit:
                    break
        content = bytes(body)
        if not is_error:
            await self._check_size(request, content)
        return httpx2.Response(response.status_code, headers=response.headers, content=content, request=response.request)

    async def _check_size(self, request: Request, body: bytes) -> None:
        """Raise BadAnswer for a body that is longer, or takes more memory as JSON, than the request allows."""
        if len(body) > request.max_bytes:
            raise BadAnswer(f"{self.url}: the answer is longer than the {request.max_bytes / 1e6:g} MB allowed for this request")
        size = await asyncio.to_thread(parsed_bytes, body) if len(body) > LARGE else 0
        if size > MAX_PARSED + PARSED_SHARE * request.max_bytes:
            raise BadAnswer(f"{self.url}: the answer would take {size / 1e6:.0f} MB of memory, more than this request allows")

    def _fault(self, response: httpx2.Response) -> Exception:
        status = response.status_code
        message = f"{self.url} answered {status}: {self._error_text(response)}"
        wait = retry_after(response)
        if status == 429 or (status == 503 and wait is not None):
            return Busy(message, min(max(MIN_RETRY_AFTER, 1.0 if wait is None else wait), MAX_RETRY_AFTER))
        if status in (401, 403):
            return Forbidden(message)
        if status in (408, 409, 425) or (status >= 500 and status != 501):  # 501: not implemented, so no retry
            return Unavailable(message)
        return Refused(message)

    def _error_text(self, response: httpx2.Response) -> str:
        """Server's error message, shortened, without the key, which an error page may repeat."""
        try:
            body = response.json()
            error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, RecursionError):
            text = response.content.decode(errors="replace")  # ignoring the codec that the server names
        if response.status_code in (404, 405, 501) and text.lstrip()[:1] == "<":
            return "a web page, so this is not an OpenAI-compatible server"
        if self._api_key:
            text = text.replace(self._api_key, "[the key]")
            if len(response.content) > MAX_ERROR:
                text = text[: -len(self._api_key)]  # the cut may be in the middle of the key
        return " ".join(text.split())[:300]

    async def close(self) -> None:
        await self._client.aclose()


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds of the Retry-After header, a number or a date; None if absent or invalid."""
    value = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError, OSError):  # not a date, or out of range
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def is_loopback(url: str) -> bool:
    """True if a URL names this machine: its requests must bypass any proxy."""
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _text(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
