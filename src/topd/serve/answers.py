"""Results as the answers of vLLM's server, and as the compact answer of /v1/score."""

import json
import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from topd.models.language_model import LanguageModel
from topd.models.logprobs import RankedLogprobs
from topd.serve.protocol import CompletionRequest
from topd.serve.work import CompletionJob, PromptInput, Scoring
from topd.serve.worker import Sampled, Scored

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have."""

CONTEXT = 8
"""Tokens of the prompt that are decoded before a completion, so that its first token is spelled as it is within a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """A token of a prompt or a completion, with what is known of it; the first of a prompt has no log-prob."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completion:
    """What was sampled, cut at a stop string."""

    positions: tuple[_Position, ...] = ()
    text: str = ""
    finish_reason: str = "length"
    stop_reason: str | int | None = None


class Spelling:
    """Token ids as text. Every token is decoded once and remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[int, str] = {}

    def token(self, token_id: int) -> str:
        if token_id not in self._tokens:
            self._tokens[token_id] = self._tokenizer.decode([token_id])
        return self._tokens[token_id]

    def text(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        return self._tokenizer.decode(list(token_ids))

    def continuation(self, prompt: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """What the ids add to the text of the prompt."""
        context = list(prompt[-CONTEXT:])
        before, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in (context, [*context, *token_ids])
        )
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def to_json(answer: Any) -> bytes:
    """Escaped, so that any string can be sent; raises ValueError for NaN."""
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def score_answer(work: Scoring, scored: Scored, *, name: str) -> bytes:
    """The safetensors of /v1/score: flat, group by group, completion by completion."""
    logprobs = [part for parts in scored.logprobs for part in parts]
    token_ids = [token for group in work.groups for completion in group.completions for token in completion]
    tensors = {"logprobs": torch.cat(logprobs), "token_ids": torch.tensor(token_ids, dtype=torch.int64)}
    return save(tensors, metadata={"model": name, "fingerprint": scored.fingerprint})


def completion_answer(
    job: CompletionJob,
    scored: Scored | None,
    sampled: Sequence[Sequence[Sampled]],
    *,
    model: LanguageModel,
    name: str,
    spelling: Spelling,
) -> dict[str, Any]:
    """The answer of /v1/completions; `sampled` holds the pieces of every prompt."""
    request, num_generated = job.request, 0
    choices: list[dict[str, Any]] = []
    prompts = _prompt_positions(job, scored)
    for prompt, positions, pieces in zip(job.prompts, prompts, sampled, strict=True):
        completions = [one for piece in pieces for one in _completions(request, piece, model, spelling)]
        for completion in completions or [_Completion()] * request.n:
            choices.append({"index": len(choices), **_choice(request, prompt, positions, completion, spelling)})
            num_generated += len(completion.positions)
    num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        },
    }


def _choice(
    request: CompletionRequest,
    prompt: PromptInput,
    positions: Sequence[_Position],
    completion: _Completion,
    spelling: Spelling,
) -> dict[str, Any]:
    text, shown = completion.text, list(completion.positions)
    if request.echo:
        given = spelling.text(prompt.token_ids) if prompt.text is None else prompt.text
        text = text if request.return_token_ids else given + text  # as vLLM: who asks for ids is not sent the prompt's text
        shown = [*positions, *shown]
    return {
        "text": text,
        "logprobs": None if request.logprobs is None else _logprobs(request, shown, request.logprobs, spelling),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": [position.token_id for position in completion.positions] if request.return_token_ids else None,
        "prompt_logprobs": _prompt_logprobs(positions, request.prompt_logprobs, spelling),
        "prompt_token_ids": list(prompt.token_ids) if request.return_token_ids else None,
    }


def _logprobs(request: CompletionRequest, positions: Sequence[_Position], top_k: int, spelling: Spelling) -> dict[str, Any]:
    """The `logprobs` object; the actual token stands first in `top_logprobs`, then the `top_k` most likely ones."""
    tokens, offsets, logprobs, tops, offset = [], [], [], [], 0
    spell = _token_id if request.return_tokens_as_token_ids else spelling.token
    for position in positions:
        token = spell(position.token_id)
        top = None
        if position.logprob is not None:
            top = {token: position.logprob}
            for token_id, logprob in position.top[:top_k]:
                top.setdefault(spell(token_id), logprob)
        tokens.append(token)
        offsets.append(offset)
        logprobs.append(position.logprob)
        tops.append(top)
        offset += len(token)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def _token_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _prompt_logprobs(positions: Sequence[_Position], top_k: int | None, spelling: Spelling) -> list[Any] | None:
    """Per token of the prompt the actual token and the `top_k` most likely ones, by id."""
    if top_k is None:
        return None
    shown: list[Any] = []
    for position in positions:
        if position.logprob is None:
            shown.append(None)
            continue
        entries = {position.token_id: (position.logprob, position.rank)}
        entries |= {token_id: (logprob, k + 1) for k, (token_id, logprob) in enumerate(position.top[:top_k])}
        shown.append(
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": spelling.token(token_id)}
                for token_id, (logprob, rank) in entries.items()
            }
        )
    return shown


def _prompt_positions(job: CompletionJob, scored: Scored | None) -> list[list[_Position]]:
    """Every prompt as positions, the scores of shared prefixes put back together."""
    if job.shared is None:
        return [[_Position(token_id=token) for token in prompt.token_ids] for prompt in job.prompts]
    rows = []
    for prompt, parts in zip(job.prompts, job.shared.parts, strict=True):
        first, rest, start = _Position(token_id=prompt.token_ids[0]), [], 1
        for group, number in parts:
            assert scored is not None, "prompts of one token alone have nothing to score"
            logprobs = scored.logprobs[group][number]
            ranked = None if scored.ranked is None else scored.ranked[group][number]
            rest += _positions(prompt.token_ids[start : start + len(logprobs)], logprobs, ranked)
            start += len(logprobs)
        rows.append([first, *rest])
    return rows


def _positions(token_ids: Sequence[int], logprobs: Tensor, ranked: RankedLogprobs | None) -> list[_Position]:
    values = [max(value, LOWEST) for value in logprobs.tolist()]
    if ranked is None:
        return [_Position(token_id=token, logprob=value) for token, value in zip(token_ids, values, strict=True)]
    columns = zip(token_ids, values, ranked.ranks.tolist(), ranked.top_ids.tolist(), ranked.top_logprobs.tolist(), strict=True)
    return [
        _Position(
            token_id=token,
            logprob=value,
            rank=rank,
            top=tuple((top_id, max(top, LOWEST)) for top_id, top in zip(top_ids, tops, strict=True)),
        )
        for token, value, rank, top_ids, tops in columns
    ]


def _completions(request: CompletionRequest, piece: Sampled, model: LanguageModel, spelling: Spelling) -> list[_Completion]:
    found = []
    for number, rollout in enumerate(piece.group.rollouts):
        ranked = None if piece.ranked is None else piece.ranked[number]
        positions = tuple(_positions(rollout.token_ids, rollout.logprobs, ranked))
        stopped = rollout.finish_reason == "stop"
        last = rollout.token_ids[-1]
        completion = _Completion(
            positions=positions,
            text=_text(request, piece.group.prompt_ids, rollout.token_ids[:-1] if stopped else rollout.token_ids, spelling),
            finish_reason=rollout.finish_reason,
            stop_reason=last if stopped and last != model.eos_token_ids[0] else None,
        )
        found.append(_cut(request, piece.group.prompt_ids, completion, spelling))
    return found


def _text(request: CompletionRequest, prompt: Sequence[int], token_ids: Sequence[int], spelling: Spelling) -> str:
    return spelling.continuation(prompt, token_ids, skip_special_tokens=request.skip_special_tokens)


def _cut(request: CompletionRequest, prompt: Sequence[int], completion: _Completion, spelling: Spelling) -> _Completion:
    """End a completion before the stop string that is complete first, and after the token that completes it."""
    found = [(start + len(stop), start, stop) for stop in request.stop_strings if (start := completion.text.find(stop)) >= 0]
    if not found:
        return completion
    end, start, stop = min(found, key=lambda one: one[0])
    token_ids = [position.token_id for position in completion.positions]

    def is_complete(num_tokens: int) -> bool:
        return len(_text(request, prompt, token_ids[:num_tokens], spelling)) >= end

    num_tokens = bisect_left(range(len(token_ids)), True, key=is_complete)
    return _Completion(
        positions=completion.positions[:num_tokens],
        text=completion.text[:start],
        finish_reason="stop",
        stop_reason=stop,
    )
