"""One module per algorithm; `algorithm.type = "topd"` selects the module `topd.algorithms.topd`. There is no registry to edit."""

import difflib
import importlib
import pkgutil
from typing import cast

from topd.algorithms.base import Algorithm, Method
from topd.config import AlgorithmConfig
from topd.errors import ConfigError


def available() -> list[str]:
    """Names of all algorithms: the modules of this package, except the protocol."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def load(name: str) -> Algorithm:
    """The algorithm's module. Raises ConfigError for an unknown name."""
    if name not in available():
        close = difflib.get_close_matches(name, available(), n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"algorithm.type must be one of {', '.join(available())}; found '{name}'.{hint}")
    return cast(Algorithm, importlib.import_module(f"{__name__}.{name}"))


def bind(config: AlgorithmConfig) -> Method:
    """Bind a configuration to the algorithm that it names."""
    return Method(load(config.type), config)
