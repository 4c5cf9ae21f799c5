"""Rotary factors that switch with sequence length: one fixed choice, and the context in which it is correct.

transformers chooses by the largest position of the whole batch, padding included, so a token's log-prob would depend on the
other rows. Here the choice is that for short sequences, up to `RotaryLimit.tokens` (docs/decisions/0018-rotary-scaling.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """Longest sequence for which the model itself uses the factors of short sequences."""

    tokens: int
    kind: str

    def reason(self) -> str:
        """Reason why the context ends here, and remedy."""
        remedy = 'a fixed rope_type, as "yarn" or "linear"'
        if self.kind == "longrope":
            remedy = "short_factor = long_factor (and short_mscale = long_mscale, where it has them)"
        return (
            f"Its rotary scaling ({self.kind}) changes beyond {self.tokens} tokens, for the whole batch at once, so the context "
            f"ends there. For longer sequences give a copy of the model whose config.json has {remedy}: one choice for every "
            "length."
        )


def fix_rotary(module: nn.Module) -> RotaryLimit | None:
    """Fix every switching rotary embedding to its factors for short sequences. Longer ones are refused by models/logprobs.py."""
    switching = [(part, limit) for part in module.modules() for limit in _limits(part)]
    if not switching:
        return None
    shortest = min((limit for _, limit in switching), key=lambda limit: limit.tokens)
    for part in {id(part): part for part, _ in switching}.values():
        part.register_forward_pre_hook(partial(_clamp, shortest.tokens - 1), with_kwargs=True)
    return shortest


def _limits(part: nn.Module) -> Iterator[RotaryLimit]:
    """Limits of one rotary embedding, per kind of layer; empty for other modules."""
    kinds: Any = getattr(part, "rope_type", None)
    config: Any = getattr(part, "config", None)
    if not isinstance(kinds, str | dict) or config is None:
        return
    settings = [config.rope_parameters[layer] for layer in kinds] if isinstance(kinds, dict) else [config.rope_parameters]
    for parameters in settings:
        kind = parameters["rope_type"]
        if "dynamic" in kind:
            yield RotaryLimit(config.max_position_embeddings, kind)
        elif kind == "longrope" and not _is_one_choice(parameters):
            yield RotaryLimit(parameters["original_max_position_embeddings"], kind)


def _is_one_choice(longrope: dict[str, Any]) -> bool:
    return all(longrope.get(f"short_{name}") == longrope.get(f"long_{name}") for name in ("factor", "mscale"))


def _clamp(last: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clamp the positions in the arguments of a rotary embedding's forward pass, (x, position_ids, ...), to `last`."""
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": kwargs["position_ids"].clamp_max(last)}
    return (args[0], args[1].clamp_max(last), *args[2:]), kwargs
