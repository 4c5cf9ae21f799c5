"""Protocol of the modules in this package. A new algorithm is one such file and one TOML; tests find it automatically."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from topd.config import AlgorithmConfig
from topd.errors import ConfigError
from topd.evidence import EVIDENCE, PROMPT_FIELDS, Wanted, of_teacher
from topd.ragged import Ragged
from topd.types import Credit, Forward


@runtime_checkable
class Weighting(Protocol):
    """Per-token shares of the loss that sum to 1 over a mini-batch; see ops/weighting.py."""

    def __call__(self, lengths: Int[Tensor, " rollout"], group_sizes: Int[Tensor, " group"]) -> Float[Tensor, " token"]: ...


@runtime_checkable
class Algorithm(Protocol):
    """The protocol, satisfied by a module. `credit` and `objective` are pure and receive the module's own `Config`."""

    NEEDS: frozenset[str]
    """Streams of evidence.EVIDENCE that credit reads, and keys of PROMPT_FIELDS. "demonstrations" replace sampling."""
    WEIGHTING: Weighting
    Config: type[AlgorithmConfig]

    def credit(self, evidence: Ragged, config: Any) -> Credit:
        """From the evidence of a whole rollout batch (evidence.py) to per-token advantages. No gradient."""

    def objective(self, forward: Forward, batch: Ragged, config: Any) -> tuple[Float[Tensor, " token"], Tensor]:
        """`batch`: the evidence of some completions, with their `advantages`.

        Per-token loss (unreduced, gradient through `forward` only), and a boolean per token: without gradient by a clip."""


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm bound to its configuration: all that the loop, the trainer and the rules of the configuration see of it."""

    algorithm: Algorithm
    config: AlgorithmConfig

    def __post_init__(self) -> None:
        """Raise ConfigError for a need that stands in no table."""
        if unknown := sorted(self.algorithm.NEEDS - EVIDENCE.keys() - PROMPT_FIELDS.keys()):
            known = ", ".join([*EVIDENCE, *PROMPT_FIELDS])
            raise ConfigError(f'algorithm.type = "{self.name}" needs {unknown[0]!r}, which is none of {known}.')

    @property
    def name(self) -> str:
        return self.config.type

    @property
    def weighting(self) -> Weighting:
        return self.algorithm.WEIGHTING

    @property
    def wanted(self) -> Wanted:
        """Streams that a teacher must give."""
        return Wanted(streams=of_teacher(self.algorithm.NEEDS), top_k=self.config.teacher_top_k)

    @property
    def asks_teacher(self) -> bool:
        """True if credit uses any stream of a teacher."""
        return bool(self.wanted.streams)

    @property
    def samples(self) -> bool:
        """True if it learns from completions of the policy, not from demonstrations."""
        return "demonstrations" not in self.algorithm.NEEDS

    @property
    def learns_from(self) -> tuple[str, ...]:
        """Fields of a `Prompt` that it cannot do without."""
        return tuple(field for need, field in PROMPT_FIELDS.items() if need in self.algorithm.NEEDS)

    def credit(self, evidence: Ragged) -> Credit:
        """See `Algorithm.credit`."""
        return self.algorithm.credit(evidence, self.config)

    def objective(self, forward: Forward, batch: Ragged) -> tuple[Float[Tensor, " token"], Tensor]:
        """See `Algorithm.objective`."""
        return self.algorithm.objective(forward, batch, self.config)
