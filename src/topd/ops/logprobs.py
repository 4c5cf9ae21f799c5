"""Log-probs of given tokens from hidden states, without holding a [tokens, vocab] float32 tensor."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ToLogits = Callable[[Tensor], Tensor]

CHUNK_ELEMENTS = 1 << 25
"""Logits alive at a time (128 MiB in float32). Larger chunks are not faster on a CPU; smaller ones start more kernels."""


def token_logprobs(
    logits: Float[Tensor, "token vocab"], token_ids: Int[Tensor, " token"], *, temperature: float
) -> Float[Tensor, " token"]:
    """Log-softmax of logits / temperature at the given token, in nats and float32: logit - logsumexp(logits).

    Gradient flows to `logits`, in their dtype. Equal to `log_softmax(...).gather(...)`, in fewer passes over the vocabulary.
    """
    return _TokenLogprobs.apply(logits, token_ids, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logit_v = (1[v = token] - softmax_v) / temperature, written into one buffer in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        scaled = logits.float() if temperature == 1 else logits.float() / temperature
        normaliser = torch.logsumexp(scaled, dim=-1)
        ctx.save_for_backward(logits, token_ids, normaliser)
        ctx.temperature = temperature
        return scaled.gather(-1, token_ids[:, None]).squeeze(-1) - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids, normaliser = ctx.saved_tensors
        gradient = logits.to(torch.float32, copy=True)
        if ctx.temperature != 1:
            gradient.div_(ctx.temperature)
        share = (grad / ctx.temperature)[:, None]
        gradient.sub_(normaliser[:, None]).exp_().mul_(-share).scatter_add_(-1, token_ids[:, None], share)
        return gradient.to(logits.dtype), None, None


def chunked_token_logprobs(
    hidden: Float[Tensor, "token hidden"],
    token_ids: Int[Tensor, " token"],
    to_logits: ToLogits,
    *,
    vocab_size: int,
    temperature: float = 1.0,
) -> Float[Tensor, " token"]:
    """`token_logprobs` of `to_logits(hidden)`, chunk by chunk; a chunk's logits are recomputed in the backward pass.

    `to_logits` is the model's output head ([n, hidden] to [n, vocab], any float dtype). Gradient flows to `hidden` and to the
    head's parameters. Memory: CHUNK_ELEMENTS logits, whatever the number of tokens. One chunk alone is not recomputed.
    """

    def chunk(hidden_chunk: Tensor, rows: slice) -> Tensor:
        return token_logprobs(to_logits(hidden_chunk), token_ids[rows], temperature=temperature)

    return _by_chunk(chunk, hidden, vocab_size)


def chunked_over_vocabulary(
    hidden: Float[Tensor, "token hidden"],
    function: Callable[[Float[Tensor, "chunk vocab"], slice], Tensor],
    to_logits: ToLogits,
    *,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    """`function` of the log-probs of the whole vocabulary, chunk by chunk: [token, ...], whatever `function` keeps per token.

    It receives log_softmax(to_logits(hidden) / temperature) in nats and float32, and the slice of tokens. Gradient flows to
    `hidden`, the head and what `function` uses. Memory as for `chunked_token_logprobs`; one chunk alone is not recomputed.
    """

    def chunk(hidden_chunk: Tensor, rows: slice) -> Tensor:
        return function(torch.log_softmax(to_logits(hidden_chunk).float() / temperature, dim=-1), rows)

    return _by_chunk(chunk, hidden, vocab_size)


def _by_chunk(chunk: Callable[[Tensor, slice], Tensor], hidden: Tensor, vocab_size: int) -> Tensor:
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(hidden) <= size:
        return chunk(hidden, slice(0, len(hidden)))
    rows = [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
    return torch.cat([checkpoint(chunk, hidden[part], part, use_reentrant=False, preserve_rng_state=False) for part in rows])
