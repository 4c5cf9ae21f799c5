"""Train a small language model from a bigger one by Trust Region Policy Distillation (arXiv 2607.04751)."""

from topd.api import evaluate, topd_advantages, train

__all__ = ["evaluate", "topd_advantages", "train"]
__version__ = "0.1.0"
