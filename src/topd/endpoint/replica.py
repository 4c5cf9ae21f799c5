"""One server: its connection, how much it has to do, and whether it can be trusted just now."""

import asyncio
import email.utils
import ipaddress
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from topd.config import server_root
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, Refused, Unavailable

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 0.1, 60.0
"""Seconds; a server that asks for less or more is asked again after these."""

CONNECT_S = 10.0
"""Seconds in which a server that is there takes a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to send: the path below the server's root, and a JSON body for a POST."""

    path: str
    json: dict[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"


class Replica:
    """One server of a pool. `url` is its root, without /v1."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = server_root(url)
        self.timeout_s = timeout_s
        self.outstanding = 0
        self.failures = 0
        """Failures in a row."""
        self.fault: Fault | None = None
        """Why it is not trusted: the circuit is open, and nothing is sent but health checks."""
        self.not_before = 0.0
        """On `time.monotonic`: the server asked not to be asked earlier."""
        self.is_another_model = False
        """A health check has found so."""
        self._api_key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
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
        """The response, if its status is 200. Raises Unavailable, Busy, Refused or Forbidden."""
        seconds = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(request.method, request.path, json=request.json)
        except TimeoutError:
            raise Unavailable(f"{self.url} did not answer within {seconds:g} s") from None
        except httpx2.TransportError as error:
            raise Unavailable(f"{self.url}: {_said(error)}") from None
        except (httpx2.InvalidURL, httpx2.DecodingError, httpx2.TooManyRedirects) as error:
            raise BadAnswer(f"{self.url}: {_said(error)}") from None
        if response.status_code == 200:
            return response
        raise self._fault(response)

    def _fault(self, response: httpx2.Response) -> Exception:
        status = response.status_code
        said = f"{self.url} answered {status}: {self._error_text(response)}"
        wait = retry_after(response)
        if status == 429 or (status == 503 and wait is not None):
            return Busy(said, min(max(MIN_RETRY_AFTER, 1.0 if wait is None else wait), MAX_RETRY_AFTER))
        if status in (401, 403):
            return Forbidden(said)
        if status in (408, 409, 425) or (status >= 500 and status != 501):  # 501: what the server cannot do at all
            return Unavailable(said)
        return Refused(said)

    def _error_text(self, response: httpx2.Response) -> str:
        """The server's own words, shortened, without the key, which an error page may repeat."""
        try:
            body = response.json()
            found = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
            text = str(found.get("message", found) if isinstance(found, dict) else found)
        except (ValueError, RecursionError):
            text = response.text
        if response.status_code in (404, 405, 501) and text.lstrip()[:1] == "<":
            return "a web page, as no OpenAI-compatible server gives it"
        if self._api_key:
            text = text.replace(self._api_key, "[the key]")
        return " ".join(text.split())[:300]

    async def close(self) -> None:
        await self._client.aclose()


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds of the Retry-After header, which is a number or a date; None if it is absent or no such thing."""
    value = response.headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine, which no proxy must come between."""
    host = httpx2.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
