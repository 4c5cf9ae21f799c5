"""Proof, at load time, that this architecture's log-probs through the shared prefix equal its own plain forward pass."""

import torch
from torch import Tensor

from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens, completion_logprobs

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Nats, mean difference over the probe: a few times rounding. A wrong mask, window, shift or logit scale is off by far more."""


def check_shared_prefix(model: LanguageModel, role: str) -> None:
    """Compare `completion_logprobs` with the model's own logits on a small ragged probe. Raises ConfigError on a mismatch."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, model.vocab_size, (64,), generator=generator).tolist()
    groups = [
        Tokens(tuple(draw[0:3]), (tuple(draw[3:8]), tuple(draw[8:10]))),
        Tokens(tuple(draw[10:24]), (tuple(draw[24:25]), tuple(draw[25:36]))),
    ]
    try:
        with torch.no_grad():
            found = completion_logprobs(model, groups)
            expected = torch.cat([_plain(model, g.prompt_ids, c) for g in groups for c in g.completions])
    except (TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise ConfigError(f"{role}: {_unsupported(model)} It fails with: {error}") from error
    mean = float((found - expected).abs().mean())
    if mean != mean:
        raise ConfigError(f"{role}: its log-probs are NaN, so its weights are broken. Copy the model again.")
    if not mean <= TOLERANCE[model.module.dtype]:
        raise ConfigError(
            f"{role}: {_unsupported(model)} Its log-probs differ by {mean:.3g} nats on average from its own forward pass."
        )


def _unsupported(model: LanguageModel) -> str:
    kind = type(model.module).__name__
    return f"the architecture {kind} cannot be used: its prompt cannot be shared by the completions of a group."


def _plain(model: LanguageModel, prompt_ids: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    """One sequence, no padding, no cache, the model's own logits."""
    ids = torch.tensor([[*prompt_ids, *completion]], device=model.device)
    with model.autocast():
        logits = model.module(input_ids=ids, use_cache=False).logits[0, :, : model.vocab_size].float()
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt_ids) - 1 : -1]
    return logprobs.gather(-1, ids[0, len(prompt_ids) :, None]).squeeze(-1)
