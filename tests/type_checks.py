"""What conftest.py switches on before topd is imported: wrong types, and axes of tensors that differ, are errors in all tests."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

SOURCES = Path(__file__).parents[1] / "src"

_made: dict[Any, Callable[..., Any]] = {}


def install() -> None:
    """Types everywhere; axes where modules name them: to compare axes costs several times the call."""
    beartype_package("topd", conf=BeartypeConf(claw_is_pep526=False, violation_type=TypeError))
    install_import_hook(modules_with_axes(), "tests.type_checks.beartype_once")


def modules_with_axes() -> list[str]:
    """Those that import from jaxtyping."""
    paths = [path for path in SOURCES.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths]


def beartype_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, whose check is made once for a function that is defined anew in each call of another one.

    What jaxtyping has checked is a stand-in that does nothing, so that one stands for all of equal signature.
    """
    key = (function.__module__, function.__qualname__, inspect.signature(function))
    try:
        return _made.setdefault(key, _made.get(key) or beartype(function))
    except TypeError:  # a default that cannot be hashed
        return beartype(function)
