"""A teacher loaded in this process."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens, score_groups
from topd.types import RolloutGroup


class LocalTeacher:
    """Scores with the same function as the trainer, so the two cannot disagree on shift, temperature or dtype.

    `map_eos` = {student's end token: teacher's end token}: a completion that ends with the first is looked up as if it ended
    with the second. Only the last position can hold an end token, and it is never fed to the model.
    """

    honours_temperature = True

    def __init__(
        self, model: LanguageModel, *, temperature: float, max_tokens: int, map_eos: Mapping[int, int] | None = None
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.map_eos = map_eos or {}

    def score(
        self, groups: Sequence[RolloutGroup], *, on_tokens: Callable[[int], None] = lambda num_tokens: None
    ) -> list[tuple[Tensor, ...]]:
        return score_groups(
            self.model,
            groups,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            targets=[self._target(group) for group in groups],
            on_tokens=on_tokens,
        )

    def _target(self, group: RolloutGroup) -> Tokens:
        return Tokens(group.prompt_ids, tuple(self._mapped(completion) for completion in group.completions))

    def _mapped(self, completion: tuple[int, ...]) -> tuple[int, ...]:
        last = completion[-1]
        return (*completion[:-1], self.map_eos.get(last, last))
