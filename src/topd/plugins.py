"""Find a module by name: one of topd's own (`topd`, `jsonl`, `vllm`), or the import path of a user's (`my_package.my_module`).

Every kind of part that can be plugged in has one package, in which each module with `Config` and `make` is a choice. There is no
registry to edit. An import path runs the user's code, because the user's configuration names it.
"""

import difflib
import functools
import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from topd.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of part that can be plugged in."""

    package: str
    """Holds topd's own modules of this kind."""
    key: str
    """The setting that names one, for messages."""
    parts: tuple[str, ...] = ("Config", "make")
    """Names that such a module defines."""

    @property
    def available(self) -> list[str]:
        """Names of topd's own modules of this kind. Nothing is imported but the package itself."""
        return _available(self.package, self.parts)

    def load(self, name: Any) -> Any:
        """The module of that name or import path. Raises ConfigError if there is none, or it lacks a part."""
        if name in self.available:
            return importlib.import_module(f"{self.package}.{name}")
        if not (isinstance(name, str) and is_path(name)):
            close = difflib.get_close_matches(str(name), self.available, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(
                f"{self.key} must be one of {', '.join(map(repr, self.available))}, or the import path of a module of your own "
                f"(my_package.my_module); found {name!r:.200}.{hint}"
            )
        module = self._import(name)
        if missing := [part for part in self.parts if not hasattr(module, part)]:
            raise ConfigError(
                f'{self.key} = "{name}": the module lacks {" and ".join(missing)}. It must define {", ".join(self.parts)} '
                "(docs/extending.md)."
            )
        return module

    def make(self, section: Any, **context: Any) -> Any:
        """Result of `make` of the module that a section's `type` names."""
        return self.load(section.type).make(section, **context)

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a module can fail in any way while it is imported
            raise ConfigError(
                f'{self.key} = "{name}" cannot be imported ({type(error).__name__}: {first_line(error)}). Install its package in '
                "this environment, or set PYTHONPATH to the folder that holds it."
            ) from error


ALGORITHM = Kind("topd.algorithms", "algorithm.type", ("Config", "NEEDS", "WEIGHTING", "credit", "objective"))
TASK = Kind("topd.tasks", "task.type")
GRADER = Kind("topd.tasks.graders", "task.grader")
ENGINE = Kind("topd.rollout", "rollout.engine")
TEACHER = Kind("topd.teacher", "teacher.type")
KINDS = (ALGORITHM, TASK, GRADER, ENGINE, TEACHER)


def is_path(name: str) -> bool:
    """True for an import path, which leads to a user's module."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) is not None


@functools.cache
def _available(package: str, parts: tuple[str, ...]) -> list[str]:
    folder = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if _defines(folder, module.name, parts))


def _defines(folder: Iterable[str], name: str, parts: tuple[str, ...]) -> bool:
    """True if the source of a module defines all parts at its top level."""
    files = [path for place in folder if (path := Path(place) / f"{name}.py").is_file()]
    source = files[0].read_text(encoding="utf-8") if files else ""
    return all(re.search(rf"^(?:class|def) {part}\b|^{part}\b.*=", source, re.MULTILINE) for part in parts)


def provenance(path: str) -> dict[str, str | None]:
    """Origin of a user's module: the distribution that holds it with its version, and the SHA-256 of its file."""
    from importlib import metadata, util  # slow to import, and seldom needed

    spec = util.find_spec(path)
    file = Path(spec.origin) if spec is not None and spec.origin else None
    names = metadata.packages_distributions().get(path.partition(".")[0], [])
    return {
        "distribution": names[0] if names else None,
        "version": metadata.version(names[0]) if names else None,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None,
    }
