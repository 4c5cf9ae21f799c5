"""Write a model as a plain Hugging Face folder that transformers and vLLM load."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from topd.errors import RunStopped, first_line
from topd.models.check import plain_logprobs
from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens
from topd.models.policy import Policy
from topd.models.proof import TOLERANCE, distance, make_probe, probe_logprobs
from topd.run.files import Note, replacing


def export(policy: Policy, folder: Path, probe: Sequence[Tokens] = (), note: Note | None = None) -> None:
    """Write weights (adapters merged, float32), configuration, generation settings and tokenizer. Complete and proven, or absent.

    Loaded with transformers, the folder must give the policy's log-probs of `probe` (default: the canary). Raises RunStopped if
    it does not, or cannot be written.
    """
    with replacing(folder, note) as partial:
        policy.merged().save_pretrained(partial)
        policy.model.tokenizer.save_pretrained(partial)
        _prove(policy.model, partial, probe or make_probe(policy.model.tokenizer), folder)


def _prove(model: LanguageModel, written: Path, probe: Sequence[Tokens], folder: Path) -> None:
    expected, why = probe_logprobs(model, probe), ""
    try:
        off = distance(_read_back(model, written, probe), expected)
        why = f"its log-probs of fixed tokens are off by {off:.3g} nats on average (at most {TOLERANCE:g} allowed)"
    except Exception as error:  # any error here would also hit a user of the folder
        off, why = float("nan"), f"transformers cannot load it ({first_line(error)})"
    if not off <= TOLERANCE:
        raise RunStopped(
            f"{folder} would not hold the trained model: {why}. It was not kept; the weights are safe in the newest checkpoint. "
            "Check student.lora and the versions of transformers and peft, then run the same command with --run.resume true."
        )


def _read_back(model: LanguageModel, folder: Path, probe: Sequence[Tokens]) -> Tensor:
    """Log-probs of the probe from the folder's model, each sequence in a plain forward pass; on the CPU if memory is short."""
    attention = model.module.config._attn_implementation
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, use_safetensors=True).eval()
    read = dataclasses.replace(model, module=module, adapter=None, autocast_dtype=None)
    with torch.no_grad():
        with contextlib.suppress(torch.OutOfMemoryError):
            module.to(model.device)
            return plain_logprobs(read, probe).cpu()
        module.to("cpu")
        return plain_logprobs(read, probe)


def export_untied(policy: Policy, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Like `export`, in `dtype`, with a separate output head even if the model ties it: servers can miss a tied one."""
    config = json.loads(policy.module.config.to_json_string(use_diff=False))
    config |= {"tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
    with replacing(folder) as partial:
        partial.mkdir()
        unshared = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in policy.weights(dtype)}
        save_file(unshared, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        policy.model.tokenizer.save_pretrained(partial)
