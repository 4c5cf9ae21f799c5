"""Train a small language model from a bigger one by Trust Region Policy Distillation (arXiv 2607.04751)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topd.api import evaluate, grade, rescore, topd_advantages, train

__all__ = ["evaluate", "grade", "rescore", "topd_advantages", "train"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the functions of `topd.api` on first use, so that `topd --help` does not wait for torch."""
    if name in __all__:
        from topd import api

        return getattr(api, name)
    raise AttributeError(f"module 'topd' has no attribute '{name}'")
