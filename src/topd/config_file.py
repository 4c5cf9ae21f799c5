"""Read, override, explain and write configurations: TOML text and command-line words -> `Config`.

load("quickstart", ["--algorithm.alpha", "0.1"]) -> Config
"""

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from topd import algorithms
from topd.config import AlgorithmConfig, Config
from topd.config_rules import broken_rules
from topd.config_words import hint
from topd.errors import ConfigError

SHIPPED = Path(__file__).parent / "configs"


def load(source: Config | str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A validated configuration from a TOML file, the name of a shipped one, or a nested mapping, plus `--a.b value` words.

    A `Config` is validated again, like a mapping.

    Raises ConfigError naming the key, the rule, the value found and the remedy.
    """
    if isinstance(source, Config):
        source = source.model_dump()
    if not isinstance(source, str | Path | Mapping):
        raise ConfigError(f"a configuration is a path, a shipped name, a mapping or a Config; found {type(source).__name__}.")
    tree = dict(source) if isinstance(source, Mapping) else _read(find(source))
    for dotted_key, value in parse_overrides(overrides):
        _assign(tree, dotted_key, value)
    return validate(tree)


def find(source: str | Path) -> Path:
    """Path of a configuration: a file, or the name of one that ships with the package."""
    path = Path(source)
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    with contextlib.suppress(OSError, ValueError):  # the name may be too long or hold a NUL
        if path.is_file():
            return path
        if path.name == str(source) and shipped.is_file():
            return shipped
    names = sorted(file.stem for file in SHIPPED.glob("*.toml"))
    raise ConfigError(
        f"no configuration file at '{source}'.{_did_you_mean(path.stem, names)} Give the path of a TOML file, or the name of a "
        f"shipped configuration: {', '.join(names)}."
    )


def validate(tree: Mapping[str, Any]) -> Config:
    """A `Config` from nested mappings, settings that depend on others resolved; all problems found are reported together."""
    problems: list[str] = []
    algorithm = algorithm_section(tree.get("algorithm"), problems)
    try:
        config = Config.model_validate({**tree, "algorithm": algorithm or AlgorithmConfig(type="unknown")})
    except ValidationError as error:
        problems += _explain(error, tree)
    if not problems:
        problems += broken_rules(config, algorithms.bind(config.algorithm))
    if problems:
        raise ConfigError("\n".join(problems))
    return config.model_copy(update={"algorithm": config.algorithm.in_precision(config.reward_dtype)})


def algorithm_section(table: Any, problems: list[str]) -> AlgorithmConfig | None:
    """The `[algorithm]` table as the `Config` of the module that it names; None, with the problems added, if it is not valid."""
    if not isinstance(table, Mapping) or not isinstance(table.get("type"), str):
        problems.append(f"algorithm.type is required: one of {', '.join(algorithms.available())}.")
        return None
    try:
        return algorithms.load(table["type"]).Config.model_validate(table)
    except ConfigError as error:
        problems.append(str(error))
    except ValidationError as error:
        problems += _explain(error, {"algorithm": table}, ("algorithm",))
    return None


def dump(config: Config) -> str:
    """The resolved configuration as TOML. Unset keys (None) are left out, as TOML has no null."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def settings(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, pydantic FieldInfo) of a section class, nested sections opened; a key comes once per `type`."""
    for name, info in model.model_fields.items():
        sections = list(_section_types(info.annotation))
        if not sections:
            yield prefix + name, info
        for section in sections:
            yield from settings(section, f"{prefix}{name}.")


def _section_types(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes that a section may be of: one, or one for each `type`."""
    if annotation is AlgorithmConfig:
        yield from (algorithms.load(name).Config for name in algorithms.available())
    elif isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in () if get_origin(annotation) is dict else getattr(annotation, "__args__", ()):
        yield from _section_types(argument)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply to be read. A configuration has sections of keys; remove the rest."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Give a TOML file that you may read.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Fix that line; strings need quotes.") from None


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--a.b value` and `--a.b=value` -> (a.b, value). A value is read as TOML, and as a plain string where that fails."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"cannot read '{word}': overrides have the form --section.key value.")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or re.match(r"--[\w-]+\.", rest[0]):
                raise ConfigError(f"--{key} has no value: overrides have the form --section.key value.")
            value = rest.pop(0)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--{key} holds bytes that are not UTF-8 text: {value!r}. Give text.") from None
        try:
            yield key, tomllib.loads(f"value = {value}")["value"]
        except RecursionError:
            raise ConfigError(f"--{key} is nested too deeply to be read. Give a plain value.") from None
        except ValueError:
            yield key, value


def _assign(tree: dict[str, Any], dotted_key: str, value: Any) -> None:
    *parents, last = dotted_key.split(".")
    for parent in parents:
        child = tree.get(parent)
        tree[parent] = dict(child) if isinstance(child, Mapping) else {}
        tree = tree[parent]
    tree[last] = _merged(tree.get(last), value)


def _merged(old: Any, new: Any) -> Any:
    """A table that is given changes the keys that it holds, unless it is of another `type`; all else replaces."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)) or new.get("type", old.get("type")) != old.get("type"):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _explain(error: ValidationError, tree: Mapping[str, Any], prefix: tuple[Any, ...] = ()) -> Iterator[str]:
    """One paragraph per problem: key, rule, value found, remedy."""
    for problem in error.errors():
        location = prefix + tuple(problem["loc"])
        if isinstance(cause := problem.get("ctx", {}).get("error"), ConfigError):
            yield _with_section(str(cause), _dotted(location))
        elif problem["type"] == "extra_forbidden":
            yield _explain_unknown(location, tree)
        else:
            yield _explain_value(location, problem)


def _with_section(message: str, dotted: str) -> str:
    """A message that begins with the bare name of a key, which several sections have, with the whole key."""
    name = dotted.rpartition(".")[2]
    return dotted + message.removeprefix(name) if message.startswith(f"{name} ") else message


def _explain_unknown(location: tuple[Any, ...], tree: Mapping[str, Any]) -> str:
    dotted = _dotted(location)
    owners = [name for name in algorithms.available() if dotted in dict(settings(algorithms.load(name).Config, "algorithm."))]
    if owners:
        remedy = f"Remove it, or set algorithm.type to {' or '.join(owners)}."
        return f"unknown key '{dotted}': algorithm.type = \"{tree['algorithm']['type']}\" has no such setting. {remedy}"
    keys = [key for key, _ in all_settings() if key != dotted]
    is_section = isinstance(tree.get(str(location[0])), Mapping)
    return f"unknown key '{dotted}'.{hint(dotted, keys, is_section=is_section)} `topd config --keys` lists every key."


def _explain_value(location: tuple[Any, ...], problem: Any) -> str:
    dotted = _dotted(location)
    info = dict(all_settings()).get(dotted)
    rule = problem["msg"].replace("Input should be", "must be").replace("Field required", "is required")
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag, known = problem["ctx"].get("tag"), problem["ctx"].get("expected_tags", "'reasoning_gym', 'jsonl', 'hub'")
        return f"{dotted}.type must be one of {known}; found {tag!r:.200}."
    if problem["type"] == "missing":
        return f"{dotted} is required and has no default. {describe(info)}".rstrip()
    return f"{dotted} {rule}; found {problem['input']!r:.200}. {describe(info)}".rstrip()


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
    models = _models(section)
    if name == "type":
        yield Setting(key, "required", f"One of {', '.join(map(_type_of, models))}.")
        return
    with_key = [model for model in models if name in model.model_fields]
    same: dict[tuple[str, str], list[type[BaseModel]]] = {}
    for model in with_key:
        info = model.model_fields[name]
        same.setdefault((_default(info), info.description or ""), []).append(model)
    for (default, meaning), owners in same.items():
        yield Setting(key, default, meaning, () if owners == models else tuple(map(_type_of, owners)))


def _models(section: str) -> list[type[BaseModel]]:
    """The classes that a section, by its dotted name, may be of."""
    models: list[type[BaseModel]] = [Config]
    for part in section.split(".") if section else ():
        annotations = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [model for annotation in annotations for model in _section_types(annotation)]
    return models


def _type_of(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0])


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return "unset" if default is None else json.dumps(default)


def describe(info: Any) -> str:
    """Meaning and default of a setting, as an error ends; "" for None."""
    if info is None:
        return ""
    default = "" if info.is_required() else f" Default: {_default(info)}."
    return f"{info.description or ''}{default}"


def _dotted(location: tuple[Any, ...]) -> str:
    """Path as written in TOML: pydantic adds the tag of a union member (task.jsonl.path), which a user never wrote."""
    tags = {"jsonl", "reasoning_gym", "hub"}
    parts = [str(part) for i, part in enumerate(location) if not (i and location[i - 1] == "task" and part in tags)]
    return ".".join(parts)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
