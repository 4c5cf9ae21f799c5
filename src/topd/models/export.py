"""Write a model as a plain Hugging Face folder that transformers and vLLM load."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from topd.models.language_model import LanguageModel
from topd.run.files import replacing


def export(model: LanguageModel, folder: Path) -> None:
    """Weights (adapters merged), configuration, generation settings, tokenizer. Complete or absent."""
    with replacing(folder) as partial:
        merged(model).save_pretrained(partial)
        model.tokenizer.save_pretrained(partial)


def export_untied(model: LanguageModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """As `export`, in `dtype`, with an output head of its own even where the model ties it to the embedding.

    A running server that reloads a tied checkpoint can miss the head, and then serves neither the old nor the new weights.
    """
    module = merged(model)
    config = json.loads(module.config.to_json_string(use_diff=False)) | {
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    with replacing(folder) as partial:
        partial.mkdir()
        save_file(_on_cpu(untied_weights(module), dtype), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        model.tokenizer.save_pretrained(partial)


def untied_weights(module: PreTrainedModel) -> dict[str, Tensor]:
    """Weights by checkpoint name, detached, with the output head among them also where it is tied."""
    head = module.get_output_embeddings()
    name = next(name for name, part in module.named_modules() if part is head)
    weights = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    return weights | {f"{name}.weight": module.get_parameter(f"{name}.weight").data}


def merged(model: LanguageModel) -> PreTrainedModel:
    """The module, or a copy with its adapters added into the weights; training may go on with the original."""
    if model.adapter is None:
        return model.module
    adapter: Any = copy.deepcopy(model.adapter)  # a peft.PeftModel
    return adapter.merge_and_unload()


def _on_cpu(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies, none sharing memory with another, which safetensors refuses."""
    return {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in weights.items()}
