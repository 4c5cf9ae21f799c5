"""A model behind one or more URLs: proven to be one and the same model, queried through a pool.

Every scoring request also contains the canary, a few fixed tokens. Its log-probs are compared with those of the first meeting, so
that the first answer of a replica that restarted with another model reveals it.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx2
import torch
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)
from torch import Tensor

from topd.config import EndpointConfig
from topd.endpoint.card import ServedCard, read_cards
from topd.endpoint.dialects import DIALECTS, Dialect, read_scores
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, OtherModel, Refused, Unavailable
from topd.endpoint.pool import Pool
from topd.endpoint.replica import Replica, Request
from topd.errors import ConfigError
from topd.models.logprobs import TokenGroup, Tokens

WAIT_PAUSE_S = 3.0
CARD_S = 15.0
"""Time limit for listing a server's models, whatever its load."""
MEETING_TRIES = 4
"""Attempts per dialect at the first meeting, before a weaker dialect is tried."""
SHOWN = 20
"""Largest number of names in a message."""
SEVERAL = 8
"""Concurrent canary requests, which detect several servers behind one URL."""

T = TypeVar("T")

log = logging.getLogger("topd.endpoint")

CANARY_TOLERANCE = 0.15
"""Nats, mean difference. Logits of bfloat16 servers vary by up to 0.12 with their batch; another model differs by whole nats."""


class ServedModel:
    """Client of one model. Call `connect` first; all other coroutines belong to the event loop it ran in.

    `name_key` is the setting that holds `name`, by default `name` of the section `role`. `one_model`: the replicas must agree at
    the first meeting; those of the rollout engine need not, as they get the trainer's weights next.
    """

    def __init__(
        self,
        section: EndpointConfig,
        *,
        role: str,
        name: str | None,
        canary: Tokens,
        temperature: float = 1.0,
        one_model: bool = True,
        verify: Callable[[Replica], Awaitable[None]] | None = None,
    ) -> None:
        self.section = section
        self.role = role
        self.name = name
        self.name_key = f"{role}.{section.NAME_KEY}"
        self.one_model = one_model
        self.canary = canary
        self.temperature = temperature
        self.card: ServedCard
        self.dialect: Dialect
        self.reference: Tensor
        """Log-probs of the canary at the first meeting."""
        key = _read_key(role, section.api_key_env)
        replicas = [Replica(url, api_key=key, timeout_s=section.timeout_s) for url in section.base_url]
        self.pool = Pool(section, replicas, verify=verify or self.verify)

    async def connect(self) -> None:
        """Meet all replicas, up to `wait_s` seconds after the first try.

        Raises ConfigError if none can be used, or they are not one model.
        """
        end = time.monotonic() + self.section.wait_s
        while True:
            outcomes = await asyncio.gather(*(self._meet(replica) for replica in self.pool.replicas), return_exceptions=True)
            if time.monotonic() > end or not all(isinstance(outcome, Unavailable) for outcome in outcomes):
                break
            log.warning("%s: waiting for a server: %s", self.role, outcomes[0])
            await asyncio.sleep(WAIT_PAUSE_S)
        pairs = list(zip(self.pool.replicas, outcomes, strict=True))
        for outcome in outcomes:
            if isinstance(outcome, Forbidden):
                raise ConfigError(self.forbidden(outcome))
            if isinstance(outcome, BaseException) and not isinstance(outcome, Fault):
                raise outcome
        met = [(replica, outcome) for replica, outcome in pairs if not isinstance(outcome, BaseException)]
        if not met:
            reasons = "\n".join(f"  {outcome}" for _, outcome in pairs)
            raise ConfigError(
                f"{self.role}.base_url: none of the servers can be used:\n{reasons}\nStart one (for example: topd serve MODEL "
                f"--port 8000), or fix the URL or {self.name_key}."
            )
        self.card, self.dialect, self.reference = met[0][1]
        for replica, (card, dialect, canary) in met[1:]:
            self._check_same(replica, card, dialect, canary)
        lengths = [card.context_length for _, (card, _, _) in met if card.context_length is not None]
        self.card = dataclasses.replace(self.card, context_length=min(lengths, default=None))
        for replica, outcome in pairs:
            if isinstance(outcome, Fault):
                self.pool.distrust(replica, outcome)

    async def _meet(self, replica: Replica) -> tuple[ServedCard, Dialect, Tensor]:
        """Return a replica's card, the first dialect it answers, and the canary's log-probs.

        A dialect is skipped at once if it is refused, and after MEETING_TRIES invalid answers. An outage (status 500, timeout)
        ends the meeting, so that it cannot select a weaker dialect. The whole meeting has `patience_s`.
        """
        end = self._end()
        card = await self.repeatedly(functools.partial(self._read_card, replica, end), end)
        refusals: list[str] = []
        for dialect in DIALECTS:
            if refusals and time.monotonic() > end:
                break
            try:
                return card, dialect, await self.repeatedly(functools.partial(self._ask, replica, dialect, card.id, end), end)
            except (Refused, BadAnswer) as fault:
                refusals.append(f"{dialect.name}: {fault}")
        tried = "\n    ".join(refusals)
        raise Refused(f"{replica.url} returns no log-probs of given tokens. Tried:\n    {tried}")

    def _end(self) -> float:
        """Deadline on `time.monotonic` for work that begins now."""
        return time.monotonic() + self.section.patience_s

    async def repeatedly(self, ask: Callable[[], Awaitable[T]], end: float | None = None) -> T:
        """Retry `ask` outside the pool after an outage or an invalid answer, until `end` or for `patience_s`."""
        seconds = (self._end() if end is None else end) - time.monotonic()
        attempts = AsyncRetrying(
            stop=stop_after_attempt(MEETING_TRIES) | stop_before_delay(max(0.0, seconds)),
            wait=wait_random_exponential(multiplier=0.25, max=2.0),
            retry=retry_if_exception_type((Unavailable, BadAnswer)) & retry_if_not_exception_type(Busy),
            reraise=True,
        )
        return await attempts(ask)

    async def _read_card(self, replica: Replica, end: float | None = None) -> ServedCard:
        seconds = min(CARD_S, replica.timeout_s)
        response = await self.patiently(replica, Request(path="/v1/models", method="GET"), timeout_s=seconds, end=end)
        cards = read_cards(replica.url, response.content)
        named = [card for card in cards if self.name in (card.id, card.root)] or (cards if self.name is None else [])
        if len(named) != 1 or not cards:
            ids = ", ".join([*(repr(card.id) for card in cards[:SHOWN]), *(["..."] if len(cards) > SHOWN else [])])
            raise Refused(
                f"{replica.url} serves {ids or 'nothing'}; wanted {self.name_key} = {self.name!r}. Set it to one of them"
            )
        return named[0]

    async def ask_canary(self, replica: Replica) -> Tensor:
        """Current log-probs of the canary from this replica."""
        return await self._ask(replica, self.dialect, self.card.id)

    async def _ask(self, replica: Replica, dialect: Dialect, model: str, end: float | None = None) -> Tensor:
        request = dialect.encode([self.canary], model=model, temperature=self._at(dialect))
        response = await self.patiently(replica, request, end=end)
        return torch.tensor(read_scores(dialect, response, [self.canary]))

    def _check_same(self, replica: Replica, card: ServedCard, dialect: Dialect, canary: Tensor) -> None:
        if dialect is not self.dialect:
            raise ConfigError(
                f"{self.role}.base_url: the servers use {self.dialect.name} and {dialect.name}. Use servers of one kind."
            )
        if card.id != self.card.id:
            raise ConfigError(
                f"{self.role}.base_url: the servers call their model {self.card.id!r} and {card.id!r}. Give it one name."
            )
        if not self.one_model:
            return
        try:
            if card.fingerprint != self.card.fingerprint:
                raise OtherModel(f"{replica.url} has other weights than {self.pool.replicas[0].url}")
            self.check_canary(replica.url, canary)
        except OtherModel as fault:
            raise ConfigError(f"{self.role}.base_url: the servers do not serve one model: {fault}. Serve one on all.") from None

    def check_canary(self, url: str, logprobs: Tensor) -> None:
        """Raise OtherModel if these log-probs differ from those of the first meeting."""
        off = float((logprobs - self.reference).abs().mean())
        if not off <= CANARY_TOLERANCE:
            raise OtherModel(f"{url} answers as another model: fixed tokens are off by {off:.2g} nats on average")

    async def verify(self, replica: Replica) -> None:
        """Raise a Fault unless a replica is alive and still serves the model first met."""
        card = await self._read_card(replica)
        if card.fingerprint != self.card.fingerprint:
            raise OtherModel(f"{replica.url} answers as another model: its weights have changed")
        await self._recognise(replica)

    async def _recognise(self, replica: Replica) -> None:
        self.check_canary(replica.url, await self.ask_canary(replica))

    async def check_together(self, replica: Replica) -> None:
        """Raise OtherModel if servers of different models answer behind this URL. Other faults are left to the pool."""
        for outcome in await asyncio.gather(*(self._recognise(replica) for _ in range(SEVERAL)), return_exceptions=True):
            if isinstance(outcome, OtherModel) or (isinstance(outcome, BaseException) and not isinstance(outcome, Fault)):
                raise outcome

    async def score(self, group: TokenGroup, *, temperature: float | None = None) -> list[Tensor]:
        """Log-probs of a group's completions. Raises a Fault once the pool gives up.

        `temperature`: default `self.temperature`. At another the canary has no reference and is left out.
        """
        if temperature not in (None, self._at(self.dialect)):
            return await self._score([group], temperature)
        return await self._score([group, self.canary])

    async def _score(self, groups: Sequence[TokenGroup], temperature: float | None = None) -> list[Tensor]:
        """Send one request. If the last group is the canary, its log-probs are checked and removed."""
        lengths = [len(completion) for group in groups for completion in group.completions]

        def read(response: httpx2.Response) -> list[Tensor]:
            self._check_fingerprint(response)
            flat = torch.tensor(read_scores(self.dialect, response, groups), dtype=torch.float32)
            parts = list(flat.split(lengths))
            if groups[-1] is self.canary:
                self.check_canary(str(response.url.copy_with(path="/")), parts.pop())
            return parts

        at = self._at(self.dialect) if temperature is None else temperature
        return await self.pool.send(lambda: self.dialect.encode(groups, model=self.card.id, temperature=at), read)

    def _check_fingerprint(self, response: httpx2.Response) -> None:
        """Raise OtherModel if the digest of weights that `topd serve` sends with every answer has changed."""
        fingerprint = response.headers.get("x-topd-fingerprint")
        if fingerprint is not None and self.card.fingerprint not in (None, fingerprint):
            raise OtherModel(f"{response.url.copy_with(path='/')} answers as another model: its weights have changed")

    def _at(self, dialect: Dialect) -> float:
        return self.temperature if dialect.honours_temperature else 1.0

    def forbidden(self, fault: Fault) -> str:
        """Message for a user whose key is refused. It never contains the key."""
        state = "is set, but refused" if os.environ.get(self.section.api_key_env) else "is not set"
        return f"{self.role}: {fault}. The key is read from the environment variable {self.section.api_key_env}, which {state}."

    async def patiently(
        self, replica: Replica, request: Request, *, timeout_s: float | None = None, end: float | None = None
    ) -> httpx2.Response:
        """Call `replica.send` outside the pool, waiting as the server asks, until `end` or for `patience_s`."""
        end = self._end() if end is None else end
        while True:
            try:
                return await replica.send(request, timeout_s=timeout_s)
            except Busy as busy:
                if time.monotonic() + busy.seconds > end:
                    raise
                await asyncio.sleep(busy.seconds)

    async def close(self) -> None:
        await self.pool.close()


def _read_key(role: str, variable: str) -> str | None:
    """Key in an environment variable. Raises ConfigError, without the key in its message, if a header cannot hold it."""
    key = os.environ.get(variable)
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"{role}: the key in the environment variable {variable} holds spaces, line breaks or other characters that no HTTP "
            "header can hold. Export it without them (a key that is read from a file often ends with a line break)."
        )
    return key
