"""The ONE function (model, prompts, completions) -> log-probs: teacher, trainer and recomputation all call it.

The prompt of a group is run once. All but its last token are one row of a first pass; its last token starts every row of the
second pass, so that row position k predicts completion token k. This is the only place with the one-token shift.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.prefix import reading, recording
from topd.ops.logprobs import CHUNK_ELEMENTS, chunked_over_vocabulary, chunked_token_logprobs
from topd.ragged import Rows
from topd.types import Forward, OverVocabulary

SLACK = 1e-4
"""A log-prob may exceed 0 by rounding."""


@runtime_checkable
class TokenGroup(Protocol):
    """A prompt and its completions, as token ids."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]: ...


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The plain `TokenGroup`."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]

    def rows(self, start: int, stop: int) -> "Tokens":
        """The same prompt with some of the completions."""
        return Tokens(self.prompt_ids, self.completions[start:stop])


def rows_of(groups: Sequence[TokenGroup], pieces: Sequence[Rows]) -> list[Tokens]:
    """Some of the completions; every piece becomes a group."""
    return [Tokens(groups[p.group].prompt_ids, groups[p.group].completions[p.start : p.stop]) for p in pieces]


def completion_logprobs(
    model: LanguageModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    targets: Sequence[TokenGroup] | None = None,
) -> Float[Tensor, " token"]:
    """Log-prob of every completion token given its prompt and what precedes it, in nats and float32.

    Flat, in order: group by group, completion by completion. Gradient flows to all weights if enabled by the caller. Logits
    are divided by `temperature`. `targets` replaces the tokens that are looked up (same shape), not those that are fed.
    Prompts and completions must have at least one token. Why two passes: docs/decisions/0001-shared-prefix.md.
    """
    return forward(model, groups, temperature=temperature, targets=targets).logprobs


def forward(
    model: LanguageModel,
    groups: Sequence[TokenGroup],
    *,
    temperature: float = 1.0,
    targets: Sequence[TokenGroup] | None = None,
) -> Forward:
    """`completion_logprobs`, with access to the rest of the vocabulary at every token."""
    targets = groups if targets is None else targets
    completions = [completion for group in groups for completion in group.completions]
    wanted = [token for group in targets for completion in group.completions for token in completion]
    with model.autocast():
        prompts = run_prompts(model, [group.prompt_ids for group in groups])
        hidden = _completion_hidden(model, groups, completions, prompts)
        logprobs = chunked_token_logprobs(
            hidden,
            torch.tensor(wanted, device=model.device),
            model.output_head(),
            vocab_size=model.vocab_size,
            temperature=temperature,
        )

    def over_vocabulary(function: OverVocabulary) -> Tensor:
        with model.autocast():
            return chunked_over_vocabulary(
                hidden, function, model.output_head(), vocab_size=model.vocab_size, temperature=temperature
            )

    return Forward(logprobs=logprobs, over_vocabulary=over_vocabulary)


@dataclass(frozen=True, slots=True)
class RecordedPrompts:
    """All prompts but their last token, left-padded, after their pass through the model."""

    mask: Int[Tensor, "prompt prefix"]
    lengths: Int[Tensor, " prompt"]
    cache: Cache


def run_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> RecordedPrompts:
    """First pass. Left padding puts every prompt next to its completion, which sliding windows rely on."""
    prefixes = [list(prompt[:-1]) for prompt in prompts]
    width = max(len(prefix) for prefix in prefixes)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prefixes], dtype=torch.long, device=model.device)
    lengths = torch.tensor([len(p) for p in prefixes], device=model.device)
    positions = torch.arange(width, device=model.device) - (width - lengths)[:, None]
    mask = (positions >= 0).long()
    cache = recording(model.num_layers)
    if width:
        model.decoder(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions.clamp_min(0),
            past_key_values=cache,
            use_cache=True,
        )
    return RecordedPrompts(mask, lengths, cache)


def _completion_hidden(
    model: LanguageModel,
    groups: Sequence[TokenGroup],
    completions: Sequence[Sequence[int]],
    prompts: RecordedPrompts,
) -> Float[Tensor, "token hidden"]:
    """Second pass: the hidden state that predicts each completion token."""
    _check_lengths(model, groups)
    rows = torch.tensor([i for i, group in enumerate(groups) for _ in group.completions], device=model.device)
    last = [group.prompt_ids[-1] for group in groups for _ in group.completions]
    lengths = torch.tensor([len(completion) for completion in completions], device=model.device)
    width = int(lengths.max())
    inputs = [[first, *c[:-1], *[0] * (width - len(c))] for first, c in zip(last, completions, strict=True)]
    offsets = torch.arange(width, device=model.device)
    mask = offsets < lengths[:, None]
    has_prefix = prompts.mask.shape[1] > 0
    states = model.decoder(
        input_ids=torch.tensor(inputs, device=model.device),
        attention_mask=torch.cat([prompts.mask[rows], mask.long()], dim=1),
        position_ids=prompts.lengths[rows][:, None] + offsets,
        past_key_values=reading(prompts.cache, rows) if has_prefix else None,
        use_cache=has_prefix,
    ).last_hidden_state
    return states[mask]


def _check_lengths(model: LanguageModel, groups: Sequence[TokenGroup]) -> None:
    """Raise ConfigError for a sequence whose positions the model, as it is held here, would get wrong."""
    longest = max(len(group.prompt_ids) + len(completion) for group in groups for completion in group.completions)
    if model.context_note and longest > model.context_length:
        raise ConfigError(f"a sequence has {longest} tokens, {model.name} takes {model.context_length}. {model.context_note}")


@torch.no_grad()
def score_groups(
    model: LanguageModel,
    groups: Sequence[TokenGroup],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    targets: Sequence[TokenGroup] | None = None,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[tuple[Tensor, ...]]:
    """`completion_logprobs` without gradient, in micro-batches: for every group, one CPU tensor per completion."""

    def score(pieces: Sequence[Rows]) -> Iterator[Tensor]:
        batch, wanted = rows_of(groups, pieces), rows_of(groups if targets is None else targets, pieces)
        flat = completion_logprobs(model, batch, temperature=temperature, targets=wanted).cpu()
        return (part.clone() for part in flat.split(_lengths(batch)))

    return _by_microbatch(groups, max_tokens, score, on_tokens)


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """The tokens of one completion among all that could have stood there: nats, float32, on the CPU."""

    logprobs: Float[Tensor, " token"]
    ranks: Int[Tensor, " token"]
    """Number of tokens at least as likely as this one, itself included: 1 for the most likely. Ties count, as in vLLM."""
    top_ids: Int[Tensor, "token k"]
    """The most likely tokens, best first."""
    top_logprobs: Float[Tensor, "token k"]


@torch.no_grad()
def ranked_logprobs(
    model: LanguageModel,
    groups: Sequence[TokenGroup],
    *,
    max_tokens: int,
    top_k: int,
    temperature: float = 1.0,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[tuple[RankedLogprobs, ...]]:
    """`score_groups`, with the rank of every token and the `top_k` most likely ones, in bounded memory."""
    to_logits, rows, k = model.output_head(), max(1, CHUNK_ELEMENTS // model.vocab_size), min(top_k, model.vocab_size)

    def rank(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        scaled = to_logits(hidden).float()
        if temperature != 1:
            scaled = scaled / temperature
        own, normaliser = scaled.gather(-1, ids[:, None]), torch.logsumexp(scaled, dim=-1, keepdim=True)
        top, top_ids = scaled.topk(k, dim=-1)
        return (own - normaliser).squeeze(-1), (scaled >= own).sum(dim=-1, dtype=torch.int32), top_ids, top - normaliser

    def score(pieces: Sequence[Rows]) -> Iterator[RankedLogprobs]:
        batch = rows_of(groups, pieces)
        completions = [completion for group in batch for completion in group.completions]
        wanted = torch.tensor([token for completion in completions for token in completion], device=model.device)
        with model.autocast():
            prompts = run_prompts(model, [group.prompt_ids for group in batch])
            hidden = _completion_hidden(model, batch, completions, prompts)
            chunks = [rank(h, ids) for h, ids in zip(hidden.split(rows), wanted.split(rows), strict=True)]
        columns = [torch.cat(column).cpu().split(_lengths(batch)) for column in zip(*chunks, strict=True)]
        return (RankedLogprobs(*(part.clone() for part in parts)) for parts in zip(*columns, strict=True))

    return _by_microbatch(groups, max_tokens, score, on_tokens)


def _lengths(groups: Sequence[TokenGroup]) -> list[int]:
    return [len(completion) for group in groups for completion in group.completions]


def _by_microbatch(
    groups: Sequence[TokenGroup],
    max_tokens: int,
    score: Callable[[Sequence[Rows]], Iterable[R]],
    on_tokens: Callable[[int], None],
) -> list[tuple[R, ...]]:
    """Call `score` for every micro-batch and return its results in the order of the groups."""
    scores: list[tuple[R, ...]] = [() for _ in groups]
    for pieces in microbatches(groups, max_tokens):
        parts = iter(score(pieces))
        for piece in pieces:
            scores[piece.group] += tuple(itertools.islice(parts, piece.stop - piece.start))
        on_tokens(sum(_lengths(rows_of(groups, pieces))))
    return scores


def microbatches(groups: Sequence[TokenGroup], max_tokens: int) -> Iterator[list[Rows]]:
    """Cut groups into micro-batches of at most `max_tokens` padded tokens: rows times (longest prompt + longest completion).

    Groups of like length come together, longest first. A group stays whole if it fits, and is cut by rows if it does not; one
    row is always allowed. The pieces of a group come in its order.
    """
    batch: list[Rows] = []
    rows = prompt_width = width = 0
    widths = [max(map(len, group.completions)) for group in groups]
    for i in sorted(range(len(groups)), key=lambda i: -widths[i]):
        prompt = len(groups[i].prompt_ids)
        for piece in _cut(i, len(groups[i].completions), max_tokens // (prompt + widths[i])):
            longest = max(map(len, groups[i].completions[piece.start : piece.stop]))
            size, wider = piece.stop - piece.start, (max(prompt_width, prompt), max(width, longest))
            if batch and (rows + size) * sum(wider) > max_tokens:
                yield batch
                batch, rows, wider = [], 0, (prompt, longest)
            batch.append(piece)
            rows, (prompt_width, width) = rows + size, wider
    if batch:
        yield batch


def _cut(group: int, size: int, fitting: int) -> list[Rows]:
    """The whole group if so many rows fit, else pieces of as many as do."""
    fitting = max(1, fitting)
    return [Rows(group, start, min(start + fitting, size)) for start in range(0, size, fitting)]
