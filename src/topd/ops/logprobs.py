"""Log-probs of given tokens from hidden states, without ever keeping a [tokens, vocab] float32 tensor."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ToLogits = Callable[[Tensor], Tensor]

CHUNK_ELEMENTS = 1 << 25
"""Logits alive at a time (128 MiB in float32). Larger chunks are not faster on a CPU; smaller ones start more kernels."""


def token_logprobs(
    logits: Float[Tensor, "token vocab"], token_ids: Int[Tensor, " token"], *, temperature: float
) -> Float[Tensor, " token"]:
    """Log-softmax of logits / temperature at the given token, in nats and float32: logit - logsumexp(logits)."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return logits.gather(-1, token_ids[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


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

    def chunk_logprobs(hidden_chunk: Tensor, ids_chunk: Tensor) -> Tensor:
        return token_logprobs(to_logits(hidden_chunk), ids_chunk, temperature=temperature)

    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(hidden) <= rows:
        return chunk_logprobs(hidden, token_ids)
    chunks = zip(hidden.split(rows), token_ids.split(rows), strict=True)
    return torch.cat([checkpoint(chunk_logprobs, h, ids, use_reentrant=False, preserve_rng_state=False) for h, ids in chunks])
