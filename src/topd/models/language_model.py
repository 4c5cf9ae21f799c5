"""A causal language model as the rest of the package sees it: weights, tokenizer, and what decides what is sampled."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """Never mutated; the weights inside `module` are, by the trainer alone."""

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion; the first is the one demonstrations end with."""
    vocab_size: int
    """Entries of the tokenizer. Rows of the output head beyond it (padding) are never sampled and get no probability."""
    context_length: int
    context_note: str = ""
    """Why the context is shorter than the model's own, and how to go beyond; empty where it is not."""
    autocast_dtype: torch.dtype | None = None
    """Precision of the forward pass where it is not that of the weights."""
    adapter: nn.Module | None = None
    """The peft.PeftModel around `module`, if low-rank adapters are trained."""
    untied: bool = False
    """Whether the output head, tied to the embedding where the model came from, has weights of its own here."""

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def decoder(self) -> nn.Module:
        """The model without its output head: token ids to hidden states."""
        return self.module.get_decoder()

    @property
    def num_layers(self) -> int:
        return self.module.config.get_text_config().num_hidden_layers

    @property
    def sampled_is_trained(self) -> bool:
        """Whether log-probs reported while sampling equal the trainer's to float32 rounding."""
        return self.module.dtype == torch.float32 and self.autocast_dtype is None

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which every forward pass runs."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def output_head(self) -> Callable[[Tensor], Tensor]:
        """Hidden states to the logits of the tokenizer's entries, with the architecture's own scale and soft cap.

        models/check.py proves for every loaded model that this equals the model's own logits.
        """
        config = self.module.config.get_text_config()
        head = self.module.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        softcap = getattr(config, "final_logit_softcapping", None)

        def to_logits(hidden: Tensor) -> Tensor:
            logits = head(hidden)[..., : self.vocab_size]
            if scale != 1:
                logits = logits * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            return logits

        return to_logits
