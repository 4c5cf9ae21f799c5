"""Proof, at load time, that this architecture's log-probs through the shared prefix equal its own plain forward pass.

Every model gets a small ragged probe. Where its configuration names a border in the context (a window, a chunk, an original
length), a second probe has rows on both sides of the border in one batch, each compared with its sequence alone.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens, completion_logprobs

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Nats, mean difference over the probe: a few times rounding. A wrong mask, window, shift or logit scale differs by far more."""

SMALL = ((3, (5, 2)), (14, (1, 11)))
"""Length of each prompt and lengths of its completions, in tokens."""

MAX_COST, MAX_COST_ELSEWHERE = {"cpu": 1e12}, 1e14
"""Multiply-adds that crossing one border may take, by kind of device: about 10 seconds."""

_BORDER = re.compile(r"window(?!_layers)|chunk|local_attention|original_max_position")


@torch.no_grad()
def check_shared_prefix(model: LanguageModel, role: str) -> None:
    """Compare `completion_logprobs` with the model's own logits. Raises ConfigError on a mismatch. Prints too costly borders."""
    _compare(model, role, _probe(model, SMALL), "")
    with _few_layers(model):
        for border, key in sorted(borders(model).items()):
            shapes = crossing(border, model.context_length)
            if _cost(model, shapes) <= MAX_COST.get(model.device.type, MAX_COST_ELSEWHERE):
                with contextlib.suppress(torch.OutOfMemoryError):
                    _compare(model, role, _probe(model, shapes), f" around {border} tokens ({key})")
                    continue
            unproven = f"log-probs around {border} tokens ({key} in its config.json) are not proven: too costly on {model.device}"
            print(f"{role}: {unproven}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _few_layers(model: LanguageModel) -> Iterator[None]:
    """Run one layer of every kind and one more, which reads the last: a long probe of all layers would take minutes."""
    decoder: Any = model.decoder
    config: Any = model.module.config.get_text_config()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or decoder.config is not config or len(layers) != model.num_layers:
        yield
        return
    by_layer = [value for value in config.to_dict().values() if isinstance(value, list) and len(value) == len(layers)]
    first = {str(kind): i for i, kind in reversed(list(enumerate(zip(*by_layer, strict=True))))}
    few = min(len(layers), max(first.values(), default=0) + 2)
    try:
        decoder.layers, config.num_hidden_layers = layers[:few], few
        try:
            plain_logprobs(model, _probe(model, ((1, (1,)),)))
        except Exception:  # some weights outside the layers depend on the number of layers: use all layers
            decoder.layers, config.num_hidden_layers = layers, len(layers)
        yield
    finally:
        decoder.layers, config.num_hidden_layers = layers, len(layers)


def borders(model: LanguageModel) -> dict[int, str]:
    """Lengths within the context at which the configuration changes the attention or positions, with the first key for each."""
    named = list(_named(model.module.config.get_text_config().to_dict()))
    if model.context_note:
        named.append(("rotary scaling", model.context_length))
    small = max(prompt for prompt, _ in SMALL)
    return {length: key for key, length in reversed(named) if small <= length <= model.context_length}


def _named(tree: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Whole numbers under keys that name a border, in nested tables and lists by layer too."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _named(value, str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from _named(value, key)
    elif type(tree) is int and _BORDER.search(key):
        yield key, tree


def crossing(border: int, context: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Shapes of a probe: one row crosses the border in its completion, one begins beyond it, and one is short.

    Where the border is the end of the context, the rows end there, and only the padding of the short row goes beyond.
    """
    return (min(border - 2, context - 6), (6,)), (min(border + 3, context - 4), (4,)), (3, (min(12, context - 3),))


def _cost(model: LanguageModel, shapes: Sequence[tuple[int, tuple[int, ...]]]) -> float:
    """Multiply-adds of the layers: for the padded batch, and for every sequence alone."""
    longest = max(prompt for prompt, _ in shapes) + max(max(completions) for _, completions in shapes)
    tokens = len(shapes) * longest + sum(prompt + sum(completions) for prompt, completions in shapes)
    weights = model.module.get_decoder().num_parameters(exclude_embeddings=True)  # embeddings are looked up, not multiplied
    width = model.module.config.get_text_config().hidden_size
    return float(tokens) * (weights + 2 * model.num_layers * width * longest)


def _probe(model: LanguageModel, shapes: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tokens]:
    """Groups of fixed random tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, model.vocab_size, (length,), generator=generator).tolist())

    return [Tokens(draw(prompt), tuple(map(draw, completions))) for prompt, completions in shapes]


def _compare(model: LanguageModel, role: str, groups: Sequence[Tokens], where: str) -> None:
    try:
        shared = completion_logprobs(model, groups)
        expected = plain_logprobs(model, groups)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise ConfigError(f"{role}: {_unsupported(model)} Error: {error}") from error
    mean = float((shared - expected).abs().mean())
    if mean != mean:
        raise ConfigError(f"{role}: its log-probs are NaN, so its weights are broken. Copy the model again.")
    if not mean <= TOLERANCE[model.module.dtype]:
        raise ConfigError(
            f"{role}: {_unsupported(model)} Its log-probs{where} differ by {mean:.3g} nats on average from its own forward pass."
        )


def _unsupported(model: LanguageModel) -> str:
    kind = type(model.module).__name__
    return f"the architecture {kind} cannot be used: its prompt cannot be shared by the completions of a group."


def plain_logprobs(model: LanguageModel, groups: Sequence[Tokens]) -> Tensor:
    """Like `completion_logprobs`, but every sequence alone: no padding, no cache, the model's own logits."""
    return torch.cat([_plain(model, group.prompt_ids, completion) for group in groups for completion in group.completions])


def _plain(model: LanguageModel, prompt_ids: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    ids = torch.tensor([[*prompt_ids, *completion]], device=model.device)
    wanted = len(completion) + 1
    few: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.module.forward).parameters:  # the logits of a long prompt need too much memory
        few["logits_to_keep"] = wanted
    with model.autocast():
        logits = model.module(input_ids=ids, use_cache=False, **few).logits[0, -wanted:-1, : model.vocab_size].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[0, len(prompt_ids) :, None]).squeeze(-1)
