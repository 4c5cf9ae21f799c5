"""Load a causal language model by name: folder, hub id, .gguf file, GGUF inside a Python package, or one that ships here."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from topd.config import Dtype, LoraConfig
from topd.errors import ConfigError, first_line
from topd.models import gguf
from topd.models.check import check_shared_prefix
from topd.models.language_model import LanguageModel
from topd.models.rotary import fix_rotary
from topd.run.digests import Digests

BUILTIN = Path(__file__).parent.parent / "builtin"
_UNSEEN = "For details look at the `CONVERSION` entries of the above report!"
"""Part of transformers' error messages that refers to a log that topd does not print."""


def load(name: str, *, dtype: Dtype, device: torch.device, role: str) -> LanguageModel:
    """Load a model and its tokenizer, without dropout. Raises ConfigError, naming `role`, for one that cannot be used."""
    transformers_logging.disable_progress_bar()
    source = _resolve(name, role)
    if Path(source).is_dir():  # a run folder has digests of its model
        Digests(Path(source).parent).check_folder(Path(source), f'{role}.name = "{name}"')
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name; transformers names them only in a log
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:  # a broken folder can fail anywhere in transformers, in any way
        reason = first_line(error).replace(_UNSEEN, "").rstrip(". ")
        raise ConfigError(
            f'{role}.name = "{name}" cannot be loaded: {reason}. The folder must hold config.json, '
            "complete model.safetensors and a tokenizer; copy it again, or give another model."
        ) from error
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f'{role}.name = "{name}": its weight {key} has shape {list(stored)}, but its config.json requires {list(wanted)}. '
            "Config and weights belong to different models; copy the folder again."
        )
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(
            f'{role}.name = "{name}" lacks weights that its config.json requires ({some}, ...), so they would be random. '
            "Give the complete model."
        )
    rows = module.get_input_embeddings().weight.shape[0]
    if 2 * len(tokenizer) < rows:  # transformers creates an empty tokenizer for some architectures without tokenizer files
        raise ConfigError(
            f'{role}.name = "{name}" has a tokenizer of {len(tokenizer)} entries for {rows} embeddings: its tokenizer files are '
            "missing or another model's. Give the complete model."
        )
    model = wrap(name, module.to(device).eval(), tokenizer)
    check_shared_prefix(model, role)
    return model


def wrap(name: str, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Make a `LanguageModel` of objects in memory; fixes the rotary factors (models/rotary.py)."""
    limit = fix_rotary(module)
    context = getattr(module.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    rows = module.get_input_embeddings().weight.shape[0]
    ends = _end_tokens(tokenizer, module.generation_config)
    if not ends:
        raise ConfigError(
            "the model has no end token (neither in tokenizer nor generation_config.json), so completions would never stop. "
            "Set eos_token in its tokenizer_config.json."
        )
    return LanguageModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, rows),
        context_length=min(context, limit.tokens) if limit else context,
        context_note=limit.reason() if limit else "",
    )


def with_adapters(model: LanguageModel, lora: LoraConfig, *, seed: int) -> LanguageModel:
    """Freeze all but new low-rank adapters; on a tied embedding or head they untie it. Raises ConfigError for unknown names."""
    try:
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError(f"student.lora needs the lora extra: pip install 'topd[lora]' ({error}).") from error

    settings = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        use_rslora=lora.use_rslora,
        target_modules=lora.target_modules,
        modules_to_save=lora.modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    _check_names(model.module, lora.modules_to_save)
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    _set_tied(model.module, False)  # else peft warns about ties that are fixed below
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapter = get_peft_model(model.module, settings)
        except Exception as error:  # peft raises various exceptions for missing modules
            raise ConfigError(f"student.lora.target_modules = {lora.target_modules!r} does not fit the model: {error}") from error
    module = adapter.get_base_model().eval()
    changed = module.get_input_embeddings() is not embedding or module.get_output_embeddings() is not head
    if is_tied and changed:  # merging adapters into one of two tied layers would change the other
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _set_tied(module, is_tied and not changed)
    return dataclasses.replace(model, module=module, adapter=adapter, untied=is_tied and changed)


def _set_tied(module: PreTrainedModel, tied: bool) -> None:
    """Set `tie_word_embeddings` for config.json."""
    for config in (module.config, module.config.get_text_config()):
        config.tie_word_embeddings = tied


def _check_names(module: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """Raise ConfigError for a name that no module has; peft ignores it."""
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    for wanted in modules_to_save:
        if wanted not in names:
            raise ConfigError(
                f"student.lora.modules_to_save must hold last parts of module names, found {wanted!r}. The model has "
                f"{', '.join(sorted(name for name in names if name and not name.isdigit()))}."
            )


def _resolve(name: str, role: str) -> str:
    """Local folder or hub id for a model name."""
    if name.startswith("builtin:"):
        folder = Path(place(name))
        if not (folder / "config.json").is_file():
            names = sorted(f"builtin:{path.parent.name}" for path in BUILTIN.glob("*/config.json"))
            raise ConfigError(f'{role}.name = "{name}" does not exist. Models that ship with topd: {", ".join(names)}.')
        return str(folder)
    if name.startswith("gguf:"):
        return str(gguf.from_package(name.removeprefix("gguf:"), role))
    if name.endswith(".gguf"):
        return str(gguf.convert(Path(name), role))
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the name is too long, holds a NUL, or names an unknown user
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser())
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f'{role}.name = "{name}" is not a folder (relative to {Path.cwd()}). Give the path of a Hugging Face model folder, '
            "a hub id (owner/name), a .gguf file or builtin:NAME."
        )
    return name


def place(name: str) -> str:
    """Folder or hub id; `builtin:NAME` is a folder of this package."""
    return str(BUILTIN / name.removeprefix("builtin:")) if name.startswith("builtin:") else name


def end_tokens(name: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    """End tokens of a model that is not loaded, from its folder or hub id; None if it has none."""
    generation = None
    with contextlib.suppress(OSError, ValueError):  # generation_config.json is optional
        generation = GenerationConfig.from_pretrained(name)
    return _end_tokens(tokenizer, generation) or None


def _end_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """The tokenizer's end token first, then others of generation_config."""
    also = generation.eos_token_id if generation else None
    others = [also] if isinstance(also, int) else list(also or [])
    return tuple(dict.fromkeys(([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) + others))
