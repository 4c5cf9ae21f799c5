"""The ONE function (model, prompts, completions) -> log-probs: teacher, trainer and recomputation all call it.

The prompt of a group is run once. All but its last token are one row of a first pass; its last token starts every row of the
second pass, so that row position k predicts completion token k. This is the only place with the one-token shift.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from topd.models.language_model import LanguageModel
from topd.models.prefix import reading, recording
from topd.ops.logprobs import chunked_token_logprobs


@runtime_checkable
class TokenGroup(Protocol):
    """A prompt and its completions, as token ids."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]: ...


G = TypeVar("G", bound=TokenGroup)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The plain `TokenGroup`."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]


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
    Prompts and completions must have at least one token. Source of the layout: one prompt pass per group, DESIGN rationale in
    docs/decisions/shared-prefix.md.
    """
    targets = groups if targets is None else targets
    completions = [completion for group in groups for completion in group.completions]
    wanted = [token for group in targets for completion in group.completions for token in completion]
    with model.autocast():
        prompts = run_prompts(model, [group.prompt_ids for group in groups])
        hidden = _completion_hidden(model, groups, completions, prompts)
        return chunked_token_logprobs(
            hidden,
            torch.tensor(wanted, device=model.device),
            model.output_head(),
            vocab_size=model.vocab_size,
            temperature=temperature,
        )


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


@torch.no_grad()
def score_groups(
    model: LanguageModel,
    groups: Sequence[G],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    targets: Sequence[TokenGroup] | None = None,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> list[tuple[Tensor, ...]]:
    """`completion_logprobs` without gradient, in micro-batches: for every group, one CPU tensor per completion."""
    wanted = dict(zip(map(id, groups), groups if targets is None else targets, strict=True))
    found: dict[int, tuple[Tensor, ...]] = {}
    for batch in microbatches(by_length(groups), max_tokens):
        aims = [wanted[id(group)] for group in batch]
        flat = completion_logprobs(model, batch, temperature=temperature, targets=aims).cpu()
        lengths = [len(completion) for group in batch for completion in group.completions]
        parts = iter(flat.split(lengths))
        found |= {id(group): tuple(next(parts).clone() for _ in group.completions) for group in batch}
        on_tokens(sum(lengths))
    return [found[id(group)] for group in groups]


def by_length(groups: Sequence[G]) -> list[G]:
    """Longest first, so that groups padded to a common length are alike."""
    return sorted(groups, key=lambda group: -max(len(completion) for completion in group.completions))


def microbatches(groups: Sequence[G], max_tokens: int) -> Iterator[list[G]]:
    """Whole groups in order, as many as fit: rows times the longest completion, at most `max_tokens` but at least one group."""
    batch: list[G] = []
    rows = width = 0
    for group in groups:
        longest = max(len(completion) for completion in group.completions)
        fits = (rows + len(group.completions)) * max(width, longest) <= max_tokens
        if batch and not fits:
            yield batch
            batch, rows, width = [], 0, 0
        batch.append(group)
        rows, width = rows + len(group.completions), max(width, longest)
    if batch:
        yield batch
