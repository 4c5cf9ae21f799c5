"""Draw one token per row from logits, reproducibly: one uniform number a token, through the inverse of the distribution."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sample_tokens(
    logits: Float[Tensor, "row vocab"], uniforms: Float[Tensor, " row"], *, temperature: float, top_p: float
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """Token ids and their log-probs (nats, float32) at `temperature`; temperature 0 is greedy, with log-probs at 1.

    The log-prob is that of the full distribution, before `top_p` cuts it. The token is where the running sum of probabilities
    passes `uniform` in [0, 1), so a row's draw does not depend on the other rows. Costs one exp and one cumsum over the
    vocabulary, and no noise over it.
    """
    logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    logprobs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    if temperature == 0:
        token_ids = logits.argmax(dim=-1)
    else:
        probs = torch.exp(logprobs)
        if top_p < 1:
            probs = nucleus(probs, top_p)
        running = probs.cumsum(dim=-1)
        targets = uniforms[:, None] * running[:, -1:]
        token_ids = torch.searchsorted(running, targets, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return token_ids, logprobs.gather(-1, token_ids[:, None]).squeeze(-1)


def nucleus(probs: Float[Tensor, "row vocab"], top_p: float) -> Float[Tensor, "row vocab"]:
    """Zero all but the smallest set of most likely tokens whose probability reaches `top_p`; not renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept)
