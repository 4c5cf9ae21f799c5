"""An answer is right if it is mathematically equal to the right one (tasks/scorers.py)."""

from typing import Literal

from topd.config import GraderConfig
from topd.tasks import scorers
from topd.tasks.task import Score


class Config(GraderConfig):
    type: Literal["math_verify"] = "math_verify"


def make(section: Config) -> Score:
    return scorers.math_verify
