"""Proof that other weights equal the policy's: both score the same fixed tokens. Export, hand-over and resume use it."""

import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from topd.models.language_model import LanguageModel
from topd.models.logprobs import TokenGroup, Tokens, score_groups

CANARY_TOKENS = 24

TOLERANCE = 1e-4
"""Nats, mean difference over the probe, for float32 weights after writing and reading, or merging. Measured: up to 3e-6."""


def make_canary(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Fixed random ordinary tokens. Every model finds them unlikely, so any two models differ widely on them."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    drawn = random.Random(0).choices(ids, k=CANARY_TOKENS + 1)
    return Tokens((drawn[0],), (tuple(drawn[1:]),))


def make_probe(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[tuple[int, ...]] = ()) -> list[Tokens]:
    """The canary, and the first tokens of some prompts, which training has changed, so a lost embedding shows there."""
    starts = [ids[: CANARY_TOKENS + 1] for ids in prompts if len(ids) > 1]
    return [make_canary(tokenizer), *(Tokens(ids[:1], (ids[1:],)) for ids in starts)]


def probe_logprobs(policy: LanguageModel, groups: Sequence[TokenGroup]) -> Tensor:
    """The policy's log-probs of all completion tokens, flat, on the CPU, in the precision of its weights."""
    exact = dataclasses.replace(policy, autocast_dtype=None)  # only the trainer has the noise of its lower precision
    return torch.cat([part for parts in score_groups(exact, groups, max_tokens=4096) for part in parts])


def distance(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference in nats; infinite for different shapes, NaN if any value is."""
    return float((a - b).abs().mean()) if a.shape == b.shape else float("inf")
