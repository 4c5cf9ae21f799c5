"""An answer is right if it equals the right one, apart from surrounding white space."""

from typing import Literal

from topd.config import GraderConfig
from topd.tasks import scorers
from topd.tasks.task import Score


class Config(GraderConfig):
    type: Literal["exact"] = "exact"


def make(section: Config) -> Score:
    return scorers.exact
