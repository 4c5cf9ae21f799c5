"""Write a model as a plain Hugging Face folder that transformers and vLLM load."""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from topd.errors import RunStopped, first_line
from topd.models.check import plain_logprobs
from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens
from topd.models.proof import TOLERANCE, distance, make_probe, probe_logprobs
from topd.run.files import Note, replacing


def export(model: LanguageModel, folder: Path, probe: Sequence[Tokens] = (), note: Note | None = None) -> None:
    """Weights (adapters merged) in float32, configuration, generation settings, tokenizer. Complete and proven, or absent.

    Read back as any user would, the folder must give the model's log-probs of `probe` (by default, of the canary). Raises
    RunStopped if it does not, or cannot be written.
    """
    with replacing(folder, note) as partial:
        merged(model).save_pretrained(partial)
        model.tokenizer.save_pretrained(partial)
        _prove(model, partial, probe or make_probe(model.tokenizer), folder)


def _prove(model: LanguageModel, written: Path, probe: Sequence[Tokens], folder: Path) -> None:
    expected, why = probe_logprobs(model, probe), ""
    try:
        off = distance(_read_back(model, written, probe), expected)
        why = f"its log-probs of fixed tokens are off by {off:.3g} nats on average (at most {TOLERANCE:g} allowed)"
    except Exception as error:  # whatever it is, a user of the folder would meet it too
        off, why = float("nan"), f"transformers cannot load it ({first_line(error)})"
    if not off <= TOLERANCE:
        raise RunStopped(
            f"{folder} would not be the model that was trained: {why}. It was not kept; the weights are safe in the newest "
            "checkpoint. Look at student.lora and at the versions of transformers and peft, then run the same command with "
            "--run.resume true."
        )


def _read_back(model: LanguageModel, folder: Path, probe: Sequence[Tokens]) -> Tensor:
    """Log-probs of the probe by the folder's model, every sequence in a plain forward pass; on the CPU if memory is short."""
    attention = model.module.config._attn_implementation
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, use_safetensors=True).eval()
    read = dataclasses.replace(model, module=module, adapter=None, autocast_dtype=None)
    with torch.no_grad():
        with contextlib.suppress(torch.OutOfMemoryError):
            module.to(model.device)
            return plain_logprobs(read, probe).cpu()
        module.to("cpu")
        return plain_logprobs(read, probe)


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
