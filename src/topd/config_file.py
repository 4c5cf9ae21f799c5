"""Read, override, explain and write configurations: TOML text and command-line words -> `Config`.

load("quickstart", ["--algorithm.alpha", "0.1"]) -> Config
"""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from topd import algorithms, config_keys
from topd.config import AlgorithmConfig, Config, EndpointConfig
from topd.config_rules import broken_rules
from topd.config_words import hint
from topd.errors import ConfigError
from topd.plugins import KINDS

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


def renewed(tree: dict[str, Any]) -> dict[str, Any]:
    """The resolved configuration of an older run in the present form, in which servers' keys are in the part that asks them."""
    moved = {*EndpointConfig.model_fields, "weights", "weights_directory", "model"}
    rollout, teachers = dict(tree.get("rollout", {})), dict(tree.get("teachers", {}))
    servers = {key: rollout.pop(key) for key in moved & rollout.keys()}
    if rollout.get("engine") == "vllm" and servers:
        rollout["vllm"] = servers
    tree = {**tree, "rollout": rollout, "teachers": {name: _renewed_teacher(table) for name, table in teachers.items()}}
    return tree | ({"teacher": _renewed_teacher(tree["teacher"])} if "teacher" in tree else {})


def _renewed_teacher(table: dict[str, Any]) -> dict[str, Any]:
    if "type" in table or "base_url" in table:
        return {"type": "served", **table}
    served_only = {*EndpointConfig.model_fields, "tokenizer"}
    return {"type": "local", **{key: value for key, value in table.items() if key not in served_only}}


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
    try:
        config = Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, tree))) from None
    if problems := broken_rules(config, algorithms.bind(config.algorithm)):
        raise ConfigError("\n".join(problems))
    return config.model_copy(update={"algorithm": config.algorithm.in_precision(config.reward_dtype)})


def algorithm_section(table: Mapping[str, Any]) -> AlgorithmConfig:
    """The `[algorithm]` table as the `Config` of the module that it names. Raises ConfigError, as `load` does."""
    try:
        return AlgorithmConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, {"algorithm": table}, ("algorithm",)))) from None


def dump(config: Config) -> str:
    """The resolved configuration as TOML. Unset keys (None) are left out, as TOML has no null."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


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
    """A message that begins with a key that several sections have, with the whole key."""
    first, _, rest = message.partition(" ")
    name = first.rpartition(".")[2]
    if dotted.rpartition(".")[2] == name:
        return f"{dotted} {rest}"
    return f"{dotted}.{name} {rest}" if first in {kind.key for kind in KINDS} else message


def _explain_unknown(location: tuple[Any, ...], tree: Mapping[str, Any]) -> str:
    dotted = _dotted(location)
    section = dotted.rpartition(".")[0]
    owners = config_keys.owners(location)
    if owners:
        return f"unknown key '{dotted}': only {section}.type = {' or '.join(owners)} has it. Remove it, or set {section}.type."
    keys = [key for key, _ in config_keys.all_settings() if key != dotted]
    is_section = isinstance(tree.get(str(location[0])), Mapping)
    return f"unknown key '{dotted}'.{hint(dotted, keys, is_section=is_section)} `topd config --keys` lists every key."


def _explain_value(location: tuple[Any, ...], problem: Any) -> str:
    dotted = _dotted(location)
    settings = dict(config_keys.all_settings())
    if problem["type"] == "missing":
        dotted += ".type" if f"{dotted}.type" in settings else ""
        return f"{dotted} is required and has no default. {config_keys.describe(settings.get(dotted))}".rstrip()
    rule = problem["msg"].replace("Input should be", "must be")
    return f"{dotted} {rule}; found {problem['input']!r:.200}. {config_keys.describe(settings.get(dotted))}".rstrip()


def _dotted(location: tuple[Any, ...]) -> str:
    return ".".join(map(str, location))


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
