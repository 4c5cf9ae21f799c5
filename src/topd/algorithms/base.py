"""What a module in this package provides. A new algorithm is one such file and one TOML; tests find it by itself."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from topd.config import AlgorithmConfig
from topd.ragged import Ragged
from topd.types import Credit

Need = Literal["teacher_logprobs", "answers", "demonstrations"]
"""What must be there: a teacher, problems with right answers, or demonstrations, which replace sampling."""


@runtime_checkable
class Weighting(Protocol):
    """Per-token shares of the loss that sum to 1 over a mini-batch; see ops/weighting.py."""

    def __call__(self, lengths: Int[Tensor, " rollout"], group_sizes: Int[Tensor, " group"]) -> Float[Tensor, " token"]: ...


@runtime_checkable
class Algorithm(Protocol):
    """The protocol, satisfied by a module. `credit` and `objective` are pure and receive the module's own `Config`."""

    NEEDS: frozenset[Need]
    WEIGHTING: Weighting
    Config: type[AlgorithmConfig]

    def credit(self, evidence: Ragged, config: Any) -> Credit:
        """From the evidence of a whole rollout batch (types.EVIDENCE) to per-token advantages. No gradient."""
        ...

    def objective(self, logprobs: Float[Tensor, " token"], batch: Ragged, config: Any) -> tuple[Float[Tensor, " token"], Tensor]:
        """`batch`: the evidence of some completions, with their `advantages`.

        Per-token loss (unreduced, gradient through `logprobs` only), and a boolean per token: without gradient by a clip."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm bound to its configuration: all that the loop, the trainer and the rules of the configuration see of it."""

    algorithm: Algorithm
    config: AlgorithmConfig

    @property
    def name(self) -> str:
        return self.config.type

    @property
    def weighting(self) -> Weighting:
        return self.algorithm.WEIGHTING

    @property
    def asks_teacher(self) -> bool:
        """Whether credit is made of a teacher's log-probs."""
        return "teacher_logprobs" in self.algorithm.NEEDS

    @property
    def samples(self) -> bool:
        """Whether it learns from completions of the policy, not from demonstrations."""
        return "demonstrations" not in self.algorithm.NEEDS

    @property
    def learns_from(self) -> tuple[str, ...]:
        """Fields of a `Prompt` that it cannot do without."""
        fields = {"answers": "answer", "demonstrations": "demonstration"}
        return tuple(field for need, field in fields.items() if need in self.algorithm.NEEDS)

    def credit(self, evidence: Ragged) -> Credit:
        """See `Algorithm.credit`."""
        return self.algorithm.credit(evidence, self.config)

    def objective(self, logprobs: Float[Tensor, " token"], batch: Ragged) -> tuple[Float[Tensor, " token"], Tensor]:
        """See `Algorithm.objective`."""
        return self.algorithm.objective(logprobs, batch, self.config)
