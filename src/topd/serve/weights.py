"""The weights of a served model: what identifies them, and how others take their place."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from topd.models.language_model import LanguageModel
from topd.serve.protocol import ApiError

CONFIG, MAX_CONFIG = "config.json", 1_000_000
"""Read for one setting; bytes."""


def fingerprint(model: LanguageModel) -> str:
    """SHA-256, in hex, over all weights (names, types, shapes, bytes) and the vocabulary.

    A tied output head counts as a copy, so a model and its untied copy have one fingerprint: they give the same numbers.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    vocabulary = sorted(model.tokenizer.get_vocab().items())
    digest.update(json.dumps([vocabulary, list(model.eos_token_ids)]).encode())
    return digest.hexdigest()


def reload_weights(model: LanguageModel, folder: Path) -> None:
    """Copy the safetensors of a folder into the module, all of them or none.

    Names and shapes must be the module's own. An output head that is missing is the embedding's, where the module is tied or
    the folder's config.json says so; one that differs from the embedding unties a tied module. Raises ApiError otherwise.
    """
    files = _files(folder)
    with ExitStack() as stack:
        try:
            opened: list[Any] = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            where = _where(files, opened)
            tied = _is_tied_after(model, folder, where)
            _check_names_and_shapes(model, where, tied=tied)
            new = {name: file.get_tensor(name) for name, file in where.items()}
            _check_finite(model, new)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ApiError(400, f"{folder} cannot be read: {error}", param="kwargs") from error
        _tie(model, tied=tied)
        with torch.no_grad():
            for name, parameter in _tensors(model).items():
                if name in new:
                    parameter.copy_(new[name])


def _where(files: Sequence[Path], opened: Sequence[Any]) -> dict[str, Any]:
    """The opened file of every weight. Raises ApiError for a weight that stands in two."""
    where: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, file in zip(files, opened, strict=True):
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in where:
                raise ApiError(400, f"{name} is in two files, {paths[name].name} and {path.name}", param="kwargs")
            where[name], paths[name] = file, path
    return where


def _files(folder: Path) -> list[Path]:
    """The safetensors of a folder. Raises ApiError for none, and for what would block or never end: a pipe, a device."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        config = [folder / CONFIG] if (folder / CONFIG).exists() else []
        odd = [file for file in [*files, *config] if not file.is_file()]
        large = any(file.stat().st_size > MAX_CONFIG for file in config)
    except OSError as error:
        raise ApiError(400, f"{folder} cannot be read: {error}", param="kwargs") from error
    if not files:
        raise ApiError(400, f"{folder} holds no .safetensors file", param="kwargs")
    if odd:
        raise ApiError(400, f"{odd[0]} is not a regular file", param="kwargs")
    if large:
        raise ApiError(400, f"{folder / CONFIG} is larger than {MAX_CONFIG / 1e6:g} MB", param="kwargs")
    return files


def _check_finite(model: LanguageModel, new: dict[str, Tensor]) -> None:
    """Raises ApiError for weights that are no finite floats, also where only the module's precision makes them so.

    Floats of 8 bits or less are refused: they mean something only with scales, which the module does not have.
    """
    own = _tensors(model)
    for name, tensor in new.items():
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise ApiError(400, f"{name} is {tensor.dtype} in the folder; hand over floats of 16 bits or more", param="kwargs")
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise ApiError(400, f"{name} is {tensor.dtype} in the folder, {own[name].dtype} here", param="kwargs")
        if not torch.isfinite(tensor.to(own[name].dtype)).all():
            raise ApiError(400, f"{name} holds NaN or infinity in {own[name].dtype}; the old weights stay", param="kwargs")


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Everything a checkpoint holds, by name; tied weights under both names."""
    return model.module.state_dict(keep_vars=True)


def _names(model: LanguageModel) -> tuple[str, str]:
    """Of the weights of embedding and output head."""
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    names: dict[nn.Module, str] = {module: f"{name}.weight" for name, module in model.module.named_modules()}
    return names[embedding], names[head]


def _is_tied_after(model: LanguageModel, folder: Path, where: dict[str, Any]) -> bool:
    """Whether the output head is to be the embedding itself."""
    embedding, head = _names(model)
    own = _tensors(model)
    is_tied = own[embedding] is own[head]
    if head in where:
        same = (
            is_tied and embedding in where and torch.equal(where[head].get_tensor(head), where[embedding].get_tensor(embedding))
        )
        return bool(same)
    config = folder / CONFIG
    content = json.loads(config.read_bytes()) if config.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG} holds no JSON object")
    return is_tied or content.get("tie_word_embeddings") is True


def _check_names_and_shapes(model: LanguageModel, where: dict[str, Any], *, tied: bool) -> None:
    own = _tensors(model)
    optional = {_names(model)[1]} if tied else set()
    missing, unknown = own.keys() - where.keys() - optional, where.keys() - own.keys()
    for what, names in (("lacks", missing), ("has besides", unknown)):
        if names:
            raise ApiError(400, f"the folder {what} {len(names)} weights: {', '.join(sorted(names)[:3])}", param="kwargs")
    for name, file in where.items():
        shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(own[name].shape):
            raise ApiError(400, f"{name} is {shape} in the folder, {tuple(own[name].shape)} here", param="kwargs")


def _tie(model: LanguageModel, *, tied: bool) -> None:
    """Make the output head the embedding, or a weight of its own."""
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    if tied:
        head.weight = embedding.weight
    elif head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    model.module.config.get_text_config().tie_word_embeddings = tied
