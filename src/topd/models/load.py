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
"""What transformers says of a log that is not shown."""


def load(name: str, *, dtype: Dtype, device: torch.device, role: str) -> LanguageModel:
    """The model and its tokenizer, in evaluation mode (no dropout: ratios compare a policy with itself).

    `role` ("student", "teacher") is named in errors. Raises ConfigError for whatever cannot be found, read or used.
    """
    transformers_logging.disable_progress_bar()
    source = _resolve(name, role)
    if Path(source).is_dir():  # the model of a run folder is what the run wrote
        Digests(Path(source).parent).check_folder(Path(source), f'{role}.name = "{name}"')
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        module, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name; transformers names them in a log that nobody sees
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
            f'{role}.name = "{name}": its weight {key} has shape {list(stored)}, and its config.json asks for {list(wanted)}. '
            "Config and weights are of two models; copy the folder again."
        )
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(
            f'{role}.name = "{name}" lacks weights that its config.json asks for ({some}, ...), so they would be random. '
            "Give the complete model."
        )
    rows = module.get_input_embeddings().weight.shape[0]
    if 2 * len(tokenizer) < rows:  # without tokenizer files, transformers makes an empty one for some architectures
        raise ConfigError(
            f'{role}.name = "{name}" has a tokenizer of {len(tokenizer)} entries for {rows} embeddings: its tokenizer files are '
            "missing or another model's. Give the complete model."
        )
    model = wrap(name, module.to(device).eval(), tokenizer)
    check_shared_prefix(model, role)
    return model


def wrap(name: str, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """A `LanguageModel` around objects already in memory, whose rotary factors are held (models/rotary.py)."""
    limit = fix_rotary(module)
    own = getattr(module.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    rows = module.get_input_embeddings().weight.shape[0]
    return LanguageModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(module, tokenizer),
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, rows),
        context_length=min(own, limit.tokens) if limit else own,
        context_note=limit.reason() if limit else "",
    )


def with_adapters(model: LanguageModel, lora: LoraConfig, *, seed: int) -> LanguageModel:
    """The same model with trainable low-rank adapters in place and everything else frozen.

    Where they sit on an embedding or output head that are tied, the two are untied. Raises ConfigError for names of no module.
    """
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
    _say_tied(model.module, False)  # else peft warns of what is put right below
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapter = get_peft_model(model.module, settings)
        except Exception as error:  # peft has exceptions of its own for modules it does not find
            raise ConfigError(f"student.lora.target_modules = {lora.target_modules!r} does not fit the model: {error}") from error
    module = adapter.get_base_model().eval()
    changed = module.get_input_embeddings() is not embedding or module.get_output_embeddings() is not head
    if is_tied and changed:  # what is merged into one of two tied layers would change the other
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _say_tied(module, is_tied and not changed)
    return dataclasses.replace(model, module=module, adapter=adapter, untied=is_tied and changed)


def _say_tied(module: PreTrainedModel, tied: bool) -> None:
    """What config.json will tell a reader of the weights."""
    for config in (module.config, module.config.get_text_config()):
        config.tie_word_embeddings = tied


def _check_names(module: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """Raise ConfigError for a name that no module has; peft passes over it."""
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
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long, a NUL, no such user: no folder
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser())
    if looks_like_path:
        raise ConfigError(
            f'{role}.name = "{name}" is no folder (looked from {Path.cwd()}). Give the path of a Hugging Face model folder, a '
            "hub id (owner/name), a .gguf file or builtin:NAME."
        )
    return name


def _eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids = _end_tokens(tokenizer, module.generation_config)
    if not ids:
        raise ConfigError(
            "the model names no end token (neither tokenizer nor generation_config.json), so completions would never stop. "
            "Set eos_token in its tokenizer_config.json."
        )
    return ids


def place(name: str) -> str:
    """Folder or hub id; `builtin:NAME` is a folder of this package."""
    return str(BUILTIN / name.removeprefix("builtin:")) if name.startswith("builtin:") else name


def end_tokens(name: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    """Tokens that end a completion of a model that is not loaded, from its folder or hub id; None if it names none."""
    generation = None
    with contextlib.suppress(OSError, ValueError):  # not every model has a generation_config.json
        generation = GenerationConfig.from_pretrained(name)
    return _end_tokens(tokenizer, generation) or None


def _end_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """The tokenizer's end token first, then whatever else generation_config stops at."""
    also = generation.eos_token_id if generation else None
    others = [also] if isinstance(also, int) else list(also or [])
    return tuple(dict.fromkeys(([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]) + others))
