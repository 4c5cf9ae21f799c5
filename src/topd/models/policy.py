"""The one owner of the weights that train: forward, update, copies, save and restore. Nothing else touches them."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from topd.config import TrainerConfig
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.logprobs import TokenGroup, forward
from topd.types import Forward


class Policy(nn.Module):
    """A language model that trains, and its optimizer. `version` counts the updates behind its weights."""

    def __init__(self, model: LanguageModel, config: TrainerConfig | None = None) -> None:
        """Raises ConfigError if `config` asks to recompute layers and the model's are not known."""
        super().__init__()
        config = config or TrainerConfig()
        self.model = model
        self.module = model.module  # registered, so that hooks around `forward` see all weights
        self.version = 0
        if config.gradient_checkpointing:
            recompute_layers(model)
        self.optimizer = _make_optimizer(self.trainable(), config)

    def forward(self, groups: Sequence[TokenGroup], *, temperature: float) -> Forward:
        """Log-prob of every completion token, as `models/logprobs.py` gives it; gradient flows to the trainable weights."""
        return forward(self.model, groups, temperature=temperature)

    def trainable(self) -> dict[str, Tensor]:
        """The weights that training changes, by name."""
        return {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients down to `max_norm`. Returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.trainable().values(), max_norm))

    def step(self, learning_rate: float) -> None:
        """Update the weights with the gradients they have."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.version += 1

    def saved_weights(self) -> dict[str, Tensor]:
        """Trainable weights on the CPU, for `restore`. On a CPU they are not copied."""
        return _on_cpu(self.trainable())

    def saved_optimizer(self) -> dict[str, Tensor]:
        """State of every weight as `weight/field` on the CPU, for `restore_optimizer`. On a CPU it is not copied."""
        state = self.optimizer.state
        fields = ((name, state.get(weight, {})) for name, weight in self.trainable().items())
        return _on_cpu({f"{name}/{key}": value for name, values in fields for key, value in values.items()})

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Put saved weights back. Raises KeyError, with nothing changed, for one that is missing."""
        trainable = self.trainable()
        if missing := trainable.keys() - weights.keys():
            raise KeyError(min(missing))
        for name, weight in trainable.items():
            weight.copy_(weights[name])

    def restore_optimizer(self, state: Mapping[str, Tensor]) -> None:
        """Put the optimizer's state back."""
        trainable = self.trainable()
        for key, value in state.items():
            name, _, field = key.rpartition("/")
            weight = trainable[name]
            self.optimizer.state[weight][field] = value if field == "step" else value.to(weight.device)

    @torch.no_grad()
    def copy_to(self, model: LanguageModel) -> None:
        """Overwrite the weights of a frozen copy of this policy, in the copy's precision."""
        if model.module is self.module:
            return
        for theirs, ours in zip(model.module.parameters(), self.module.parameters(), strict=True):
            theirs.copy_(ours)

    def snapshot(self) -> LanguageModel:
        """A frozen copy that gives the log-probs of the policy as it is now."""
        return dataclasses.replace(frozen_copy(self.model, self.module.dtype), autocast_dtype=self.model.autocast_dtype)

    def merged(self) -> PreTrainedModel:
        """The module, or a copy with its adapters added into the weights; training may go on with the original."""
        if self.model.adapter is None:
            return self.module
        adapter: Any = copy.deepcopy(self.model.adapter)  # a peft.PeftModel
        return adapter.merge_and_unload()

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights by checkpoint name, adapters merged, with the output head among them also where it is tied."""
        module = self.merged()
        head = module.get_output_embeddings()
        name = next(name for name, part in module.named_modules() if part is head)
        named = module.state_dict() | {f"{name}.weight": module.get_parameter(f"{name}.weight").data}
        return ((name, tensor.detach().to(dtype)) for name, tensor in named.items())


def frozen_copy(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """A frozen copy of the model in another precision, adapters included, to sample from."""
    module = copy.deepcopy(model.module).requires_grad_(False)
    for parameter in module.parameters():  # not .to(dtype), which also rounds the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    return dataclasses.replace(model, module=module, autocast_dtype=None, adapter=None)


def recompute_layers(model: LanguageModel) -> None:
    """Recompute decoder layers in the backward pass; transformers' own switch drops the prompt's keys. Raises ConfigError."""
    layers: Any = getattr(model.decoder, "layers", None)
    if layers is None:
        kind = type(model.module).__name__
        raise ConfigError(f"trainer.gradient_checkpointing = true does not know the layers of {kind}. Set it to false.")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _make_optimizer(trainable: Mapping[str, Tensor], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW in float32; weight decay on matrices only, as is usual."""
    groups = [
        {"params": [weight for weight in trainable.values() if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trainable.values() if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.betas[0], config.betas[1]))


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
