"""A teacher behind URLs: scores token ids, several groups in flight, with a cache on disk.

A group that cannot be scored is given up alone; the run goes on without it, or stops once too many are (collect/score.py).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from topd.config import Config as RunConfig
from topd.config import EndpointConfig, EnvironmentName, MapEos, TeacherConfig
from topd.endpoint.background import Background, all_or_none
from topd.endpoint.cache import ScoreCache
from topd.endpoint.faults import BadAnswer, Fault, Forbidden, OtherModel
from topd.endpoint.meeting import Meeting
from topd.endpoint.replica import Request
from topd.endpoint.served import CANARY_TOLERANCE, ServedModel
from topd.errors import ConfigError, RunStopped, first_line
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.models.load import end_tokens, place
from topd.models.logprobs import TokenGroup, Tokens
from topd.models.proof import distance, make_canary
from topd.ragged import Ragged
from topd.rollout.engine import Resources
from topd.rollout.served import ServedEngine
from topd.teacher.fit import check_decoding, check_end_tokens, check_tokenizer, end_token_map
from topd.teacher.local import DEFAULT, mapped
from topd.teacher.teacher import Check, Scores, Unscored, scored
from topd.types import RolloutGroup

MAX_REQUEST_TOKENS = 131_072
"""Prompt and completion tokens in one request; a larger group is cut by rows."""


class Config(TeacherConfig, EndpointConfig):
    MAY_CHANGE = TeacherConfig.MAY_CHANGE | EndpointConfig.MAY_CHANGE
    type: Literal["served"] = "served"
    map_eos: MapEos = False
    tokenizer: str | None = Field(
        None, description="Folder or hub id with the tokenizer of a served teacher, where its servers cannot prove theirs."
    )
    api_key_env: EnvironmentName = Field("TOPD_TEACHER_API_KEY", description="Environment variable that holds the servers' key.")


def make(section: Config, *, role: str, config: RunConfig, student: LanguageModel, resources: Resources) -> "EndpointTeacher":
    return EndpointTeacher(
        section,
        resources.background,
        role=role,
        student=student,
        temperature=config.rollout.temperature,
        cache=resources.cache,
    )


class EndpointTeacher:
    """Connects at once. Raises ConfigError if no server can be used, or they are not one model."""

    context_note = ""
    gives = frozenset({"teacher_logprobs"})

    def __init__(
        self,
        config: Config,
        background: Background,
        *,
        role: str,
        student: LanguageModel,
        temperature: float,
        cache: ScoreCache | None,
    ) -> None:
        self.role = role
        self.config = config
        self.student = student
        self.cache = cache
        self.background = background
        self.served = ServedModel(
            config, role=role, name=config.name, canary=make_canary(student.tokenizer), temperature=temperature
        )
        self._pending: dict[Tokens, Future[list[Tensor]]] = {}
        self._cached = 0
        self._counted = (0, 0)
        self.tokenizer = _load_tokenizer(config.tokenizer, role) if config.tokenizer else None
        background.at_close(self.served.close)
        background.run(self.served.connect())
        self.map_eos = self._map_eos()
        self._first_form = self.served.dialect.name
        """Name of the form of the run's first answers."""

    @property
    def honours_temperature(self) -> bool:
        return self.served.dialect.honours_temperature

    @property
    def temperature(self) -> float:
        return self.served.temperature if self.honours_temperature else 1.0

    @property
    def engine_kind(self) -> str:
        return self.served.dialect.engine_kind

    @property
    def context_length(self) -> int | None:
        length = self.served.card.context_length
        return None if length is None else length - self.served.dialect.spare_tokens

    @property
    def identity(self) -> str:
        """Inputs of scores besides the token ids: the model, its weights if the server sends a digest, temperature."""
        card = self.served.card
        return hashlib.sha256(repr((card.id, card.root, card.fingerprint, self.temperature)).encode()).hexdigest()

    @property
    def meeting(self) -> Meeting:
        """Identity of the teacher, for a resumed run."""
        served = self.served
        return Meeting(form=served.dialect.name, fingerprint=served.card.fingerprint, canary=served.reference.tolist())

    def recognise(self, before: Meeting) -> None:
        """Raise ConfigError if the run met another model under this name when it began."""
        self._first_form = before.form
        off = distance(torch.tensor(before.canary), self.served.reference)
        reason = "" if off <= CANARY_TOLERANCE else f"fixed tokens are off by {off:.2g} nats on average"
        if None not in (before.fingerprint, self.served.card.fingerprint) and before.fingerprint != self.served.card.fingerprint:
            reason = reason or "its weights have another digest"
        if reason:
            raise ConfigError(
                f"{self.role}: the servers answer as another model than the one this run began with: {reason}. Serve that model "
                "again, or start a new run in another run.directory."
            )

    def _map_eos(self) -> dict[int, int]:
        if not self.config.map_eos:
            return {}
        ends = self._eos_token_ids()
        if ends is None:
            raise ConfigError(
                f"{self.role}.map_eos = true needs the teacher's end tokens, which its servers do not tell. Set "
                f"{self.role}.tokenizer to the folder or hub id of the teacher."
            )
        return end_token_map(self.student.eos_token_ids, ends)

    def _eos_token_ids(self) -> tuple[int, ...] | None:
        if self.served.card.eos_token_ids or self.tokenizer is None or self.config.tokenizer is None:
            return self.served.card.eos_token_ids or None
        return end_tokens(place(self.config.tokenizer), self.tokenizer)

    def checks(self, student: LanguageModel, *, asked: bool) -> list[Check]:
        checks = [self._check_servers(), self._check_vocabulary(student)]
        if checks[-1].ok and asked:
            checks.append(self._check_end_tokens(student))
        return checks

    def _check_servers(self) -> Check:
        """Check of the servers' identity and dialect."""
        replicas, card, form = self.served.pool.replicas, self.served.card, self.served.dialect.name
        trusted = [replica for replica in replicas if replica.trusted]
        notes = [f"; {replica.fault}" for replica in replicas if not replica.trusted]
        changed = form != self._first_form
        if changed:
            notes.append(
                f". This run began with {self._first_form}: another form proves more or less (docs/serving.md). Look at what "
                "changed in the servers"
            )
        weights = f", weights {card.fingerprint[:12]}" if card.fingerprint else ""
        answering = f"{len(trusted)} of {len(replicas)} answer as one model, {card.id!r}, by {form}{weights}"
        try:
            self.background.run(all_or_none(self.served.check_together(replica) for replica in trusted))
        except OtherModel as fault:
            detail = f"{fault}, though not always: a load balancer with several models behind it. Serve one model on all."
            return Check(name="teacher servers", ok=False, detail=detail)
        return Check(name="teacher servers", ok=True, warning=changed, detail=answering + "".join(notes))

    def _check_vocabulary(self, student: LanguageModel) -> Check:
        if self.tokenizer is not None:
            return check_tokenizer(student, self.tokenizer)
        try:
            return check_decoding(student, self._decode)
        except Fault as error:
            return Check(
                name="vocabulary",
                ok=False,
                detail=f"the servers cannot show their tokenizer (POST /detokenize: {error}), so nothing proves that both models "
                f"mean the same tokens. Set {self.role}.tokenizer to the folder or hub id of the teacher.",
            )

    def _decode(self, token_ids: Sequence[int]) -> str:
        replica = next(replica for replica in self.served.pool.replicas if replica.trusted)
        body = {"model": self.served.card.id, "tokens": list(token_ids), "skip_special_tokens": False}
        request = Request(path="/detokenize", json=body)

        async def ask() -> str:
            response = await self.served.patiently(replica, request)
            try:
                answer = response.json()
                text = answer["prompt"] if "prompt" in answer else answer["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise BadAnswer(f"an answer that cannot be read ({type(error).__name__}: {error})") from None
            if not isinstance(text, str):
                raise BadAnswer("an answer whose text is none")
            return text

        return self.background.run(self.served.repeatedly(ask))

    def _check_end_tokens(self, student: LanguageModel) -> Check:
        ends = self._eos_token_ids()
        if ends is not None:
            return check_end_tokens(student, ends, self.config.map_eos)
        return Check(
            name="end token",
            ok=True,
            detail="not proven: the servers do not tell their end tokens. If completions grow without end, set "
            f"{self.role}.tokenizer to the folder or hub id of the teacher to have it checked.",
        )

    def prefetch(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            tokens = Tokens(group.prompt_ids, mapped(group.completions, self.map_eos))
            if tokens not in self._pending:
                self._pending[tokens] = self.background.submit(self._score(tokens))

    def score(
        self,
        groups: Sequence[RolloutGroup],
        wanted: Wanted = DEFAULT,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Ragged | Unscored]:
        self.prefetch(groups)
        pending, self._pending = self._pending, {}
        try:
            rows: list[Ragged | Unscored] = []
            for group in groups:
                tokens = Tokens(group.prompt_ids, mapped(group.completions, self.map_eos))
                rows.append(self._result(group, pending[tokens]))
                on_tokens(sum(map(len, group.completions)))
            return rows
        finally:
            for future in pending.values():
                future.cancel()

    def _result(self, group: RolloutGroup, future: "Future[list[Tensor]]") -> Ragged | Unscored:
        try:
            return scored(group, teacher_logprobs=future.result())
        except Forbidden as fault:
            raise RunStopped(self.served.forbidden(fault)) from fault
        except (Fault, CancelledError) as fault:
            return Unscored(str(fault))

    async def _score(self, group: Tokens) -> list[Tensor]:
        """Log-probs of a group's completions: what the cache knows from there, the rest from the servers."""
        known = self.cache.get(self.identity, group) if self.cache else [None] * len(group.completions)
        missing = [i for i, part in enumerate(known) if part is None]
        self._cached += len(known) - len(missing)
        pieces = _cut(Tokens(group.prompt_ids, tuple(group.completions[i] for i in missing)))
        answers = await all_or_none(self._ask(piece) for piece in pieces)
        new = dict(zip(missing, (part for parts in answers for part in parts), strict=True))
        return [new[i] if part is None else part for i, part in enumerate(known)]

    async def _ask(self, group: Tokens) -> list[Tensor]:
        logprobs = await self.served.score(group)
        if self.cache:
            self.cache.put(self.identity, group, logprobs)
        return logprobs

    def log_probs(self, groups: Sequence[TokenGroup], *, temperature: float | None = None) -> list[Scores]:
        """Asks the servers, whatever the cache knows. Raises a Fault."""

        async def ask(group: TokenGroup) -> Scores:
            pieces = _cut(Tokens(group.prompt_ids, group.completions))
            parts = await all_or_none(self.served.score(piece, temperature=temperature) for piece in pieces)
            return tuple(part for piece in parts for part in piece)

        return self.background.run(all_or_none(map(ask, groups)))

    def engine(self) -> ServedEngine:
        ends = (*self.student.eos_token_ids, *self.map_eos.values())
        return ServedEngine(self.served, self.background, student=self.student, eos_token_ids=ends)

    def counts(self) -> Mapping[str, int]:
        pool = self.served.pool
        before, self._counted = self._counted, (pool.num_requests, pool.num_retries)
        cached, self._cached = self._cached, 0
        return {"requests": pool.num_requests - before[0], "retries": pool.num_retries - before[1], "cached": cached}


def _cut(group: Tokens) -> list[Tokens]:
    """Pieces that fit into one request; a single row always does."""
    if not group.completions:
        return []
    longest = len(group.prompt_ids) + max(map(len, group.completions))
    rows = max(1, MAX_REQUEST_TOKENS // longest)
    return [group.rows(start, start + rows) for start in range(0, len(group.completions), rows)]


def _load_tokenizer(name: str, role: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(place(name), trust_remote_code=False)
    except Exception as error:  # a broken folder can fail anywhere in transformers, in any way
        raise ConfigError(
            f'{role}.tokenizer = "{name}" cannot be loaded: {first_line(error)}. Give a folder or hub id.'
        ) from error
