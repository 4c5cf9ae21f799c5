"""Every key of the configuration, those of all modules that can be plugged in included, as lists for readers."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from topd.config import Config, EngineConfig, GraderConfig
from topd.plugins import ENGINE


def parts(model: type[BaseModel]) -> dict[str, list[type[BaseModel]]]:
    """The keys of a section, each with the classes that it may be of if it is a section itself.

    The section of an engine has the engine's name.
    """
    classes: dict[str, list[type[BaseModel]]] = {}
    for name, info in model.model_fields.items():
        sections = list(_section_types(info.annotation))
        if EngineConfig in sections:
            classes |= {engine: [ENGINE.load(engine).Config] for engine in ENGINE.available}
        else:
            classes[name] = [own for section in sections for own in _choices(section)]
    return classes


def _choices(section: type[BaseModel]) -> list[type[BaseModel]]:
    """The `Config` of each module that a section may name; the section itself if it names none."""
    if "KIND" not in vars(section):
        return [section]
    kind = vars(section)["KIND"]
    return [] if section is GraderConfig else [kind.load(name).Config for name in kind.available]


def _section_types(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in () if get_origin(annotation) is dict else getattr(annotation, "__args__", ()):
        yield from _section_types(argument)


def settings(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, pydantic FieldInfo) of a section class, nested sections opened; a key comes once per `type`."""
    for name, sections in parts(model).items():
        if not sections:
            yield prefix + name, model.model_fields[name]
        for section in sections:
            yield from settings(section, f"{prefix}{name}.")


def all_settings() -> list[tuple[str, Any]]:
    """Every (dotted key, FieldInfo), each key once, with the FieldInfo of the last `type` that has it."""
    return list(dict(settings()).items())


class Setting(NamedTuple):
    """A key as readers see it. `default`: TOML, "unset" or "required". `types`: those of its section that have it; empty: all."""

    key: str
    default: str
    meaning: str
    types: tuple[str, ...] = ()

    def __str__(self) -> str:
        only = f"For type {', '.join(self.types)}. " if self.types else ""
        return f"{only}{self.meaning} {'Required' if self.default == 'required' else f'Default: {self.default}'}."


def listing() -> list[Setting]:
    """Every key, in the order of `Config`: once, or once for each of its defaults and meanings where types differ in them."""
    return [setting for key in dict(settings()) for setting in _listed(key)]


def _listed(key: str) -> Iterator[Setting]:
    section, _, name = key.rpartition(".")
    models = _models(section.split(".") if section else [])
    if name == "type":
        base = next(base for base in models[0].__mro__ if "KIND" in vars(base))
        unset = getattr(base, "model_fields")["type"].description  # noqa: B009
        choices = f"One of {', '.join(map(_type_of, models))}, or an import path (docs/extending.md)."
        yield Setting(key, "unset" if unset else "required", f"{choices} {unset or ''}".rstrip())
        return
    with_key = [model for model in models if name in model.model_fields]
    same: dict[tuple[str, str], list[type[BaseModel]]] = {}
    for model in with_key:
        info = model.model_fields[name]
        same.setdefault((_default(info), info.description or ""), []).append(model)
    for (default, meaning), models_with_it in same.items():
        yield Setting(key, default, meaning, () if models_with_it == models else tuple(map(_type_of, models_with_it)))


def owners(location: tuple[Any, ...]) -> list[str]:
    """The types of the key's section that have the key, for a location in a tree of tables."""
    names = [str(part) for part in location if not isinstance(part, int)]
    if names[0] == "teachers":
        names = ["teacher", *names[2:]]
    return [_type_of(model) for model in _models(names[:-1]) if names[-1] in model.model_fields and "type" in model.model_fields]


def _models(names: list[str]) -> list[type[BaseModel]]:
    """The classes that a section may be of, by the parts of its dotted name."""
    models: list[type[BaseModel]] = [Config]
    for name in names:
        models = [section for model in models for section in parts(model).get(name, [])]
    return models


def _type_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0])


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    default = default.model_dump() if isinstance(default, BaseModel) else default
    return "unset" if default is None else json.dumps(default)


def describe(info: Any) -> str:
    """Meaning and default of a setting, as an error ends; "" for None."""
    if info is None:
        return ""
    default = "" if info.is_required() else f" Default: {_default(info)}."
    return f"{info.description or ''}{default}"
