"""A causal language model as the rest of the package sees it: weights, tokenizer, end tokens, vocabulary and context."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """Model and tokenizer. Immutable, except that the trainer changes the weights of `module`."""

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    """Tokens that end a completion; demonstrations end with the first."""
    vocab_size: int
    """Entries of the tokenizer. Rows of the output head beyond it (padding) are never sampled and get no probability."""
    context_length: int
    context_note: str = ""
    """Reason and remedy if the context is shorter than the model's own; else empty."""
    autocast_dtype: torch.dtype | None = None
    """Precision of the forward pass, if it differs from that of the weights."""
    adapter: nn.Module | None = None
    """The peft.PeftModel around `module`, if low-rank adapters are trained."""
    untied: bool = False
    """True if the source model ties its output head to the embedding, and this one does not."""

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
        """True if log-probs reported while sampling equal the trainer's to float32 rounding."""
        return self.module.dtype == torch.float32 and self.autocast_dtype is None

    def autocast(self) -> AbstractContextManager[None]:
        """Context manager for every forward pass."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def output_head(self) -> Callable[[Tensor], Tensor]:
        """Function from hidden states to the logits of the tokenizer's entries, scaled and capped as models/check.py proves."""
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
