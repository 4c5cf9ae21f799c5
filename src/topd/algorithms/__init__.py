"""One module per algorithm; `algorithm.type = "topd"` selects the module `topd.algorithms.topd`. There is no registry to edit."""

from typing import cast

from topd.algorithms.base import Algorithm, Method
from topd.config import AlgorithmConfig
from topd.plugins import ALGORITHM


def available() -> list[str]:
    """Names of topd's own algorithms."""
    return ALGORITHM.available


def load(name: str) -> Algorithm:
    """The algorithm's module, by name or import path. Raises ConfigError for an unknown one."""
    return cast(Algorithm, ALGORITHM.load(name))


def bind(config: AlgorithmConfig) -> Method:
    """Bind a configuration to the algorithm that it names."""
    return Method(load(config.type), config)
