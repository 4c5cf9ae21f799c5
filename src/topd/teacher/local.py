"""A teacher loaded in this process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from topd.config import Config as RunConfig
from topd.config import MapEos, TeacherConfig
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.models.load import load
from topd.models.logprobs import TokenGroup, Tokens, ranked_logprobs, score_groups
from topd.ragged import Ragged
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import Resources
from topd.teacher.fit import check_end_tokens, check_vocabulary, end_token_map
from topd.teacher.teacher import Check, Scores, Unscored, scored
from topd.types import RolloutGroup

DEFAULT = Wanted()


class Config(TeacherConfig):
    type: Literal["local"] = "local"
    map_eos: MapEos = False


def make(section: Config, *, role: str, config: RunConfig, student: LanguageModel, resources: Resources) -> "LocalTeacher":
    model = load(section.name, dtype=section.dtype, device=student.device, role=role)
    return LocalTeacher(
        model,
        temperature=config.rollout.temperature,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        max_concurrent_rollouts=max(config.rollout.max_concurrent_rollouts, config.eval.samples_per_problem),
        map_eos=end_token_map(student.eos_token_ids, model.eos_token_ids) if section.map_eos else None,
    )


class LocalTeacher:
    """Teacher that scores with the trainer's function, so the two cannot disagree on shift, temperature or dtype.

    A completion that ends with a key of `map_eos` is scored as if it ended with the value, which is never fed to the model.
    """

    honours_temperature = True
    gives = frozenset({"teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"})
    engine_kind = "embedded"

    def __init__(
        self,
        model: LanguageModel,
        *,
        temperature: float,
        max_tokens: int,
        max_concurrent_rollouts: int = 64,
        map_eos: Mapping[int, int] | None = None,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.map_eos = map_eos or {}
        self.context_length: int | None = model.context_length
        self.context_note = model.context_note

    def checks(self, student: LanguageModel, *, asked: bool) -> list[Check]:
        vocabulary = check_vocabulary(student, self.model)
        if not (vocabulary.ok and asked):
            return [vocabulary]
        return [vocabulary, check_end_tokens(student, self.model.eos_token_ids, bool(self.map_eos))]

    def prefetch(self, groups: Sequence[RolloutGroup]) -> None:
        """No-op: the processor is busy sampling."""

    def score(
        self,
        groups: Sequence[RolloutGroup],
        wanted: Wanted = DEFAULT,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Ragged | Unscored]:
        targets = [Tokens(group.prompt_ids, mapped(group.completions, self.map_eos)) for group in groups]
        if not wanted.top_k:
            logprobs = score_groups(
                self.model,
                groups,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                targets=targets,
                on_tokens=on_tokens,
            )
            return [scored(group, teacher_logprobs=parts) for group, parts in zip(groups, logprobs, strict=True)]
        ranked = ranked_logprobs(  # a completion's last token is looked up and never fed, so the mapped ones serve as input
            self.model,
            targets,
            max_tokens=self.max_tokens,
            top_k=wanted.top_k,
            temperature=self.temperature,
            on_tokens=on_tokens,
        )
        return [
            scored(
                group,
                teacher_logprobs=[row.logprobs for row in rows],
                teacher_top_ids=[exchanged(row.top_ids, self.map_eos) for row in rows],
                teacher_top_logprobs=[row.top_logprobs for row in rows],
            )
            for group, rows in zip(groups, ranked, strict=True)
        ]

    def log_probs(self, groups: Sequence[TokenGroup], *, temperature: float | None = None) -> list[Scores]:
        temperature = self.temperature if temperature is None else temperature
        return list(score_groups(self.model, groups, max_tokens=self.max_tokens, temperature=temperature))

    def engine(self) -> EmbeddedEngine:
        return EmbeddedEngine(self.model, max_concurrent_rollouts=self.max_concurrent_rollouts)

    def counts(self) -> Mapping[str, int]:
        return {}


def mapped(completions: Sequence[tuple[int, ...]], map_eos: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """Completions whose last token is replaced according to `map_eos`."""
    return tuple((*completion[:-1], map_eos.get(completion[-1], completion[-1])) for completion in completions)


def exchanged(token_ids: Tensor, map_eos: Mapping[int, int]) -> Tensor:
    """The teacher's ids as the student's: each pair of end tokens of `map_eos` changes places."""
    result = token_ids.clone()
    for ours, theirs in map_eos.items():
        result[token_ids == theirs], result[token_ids == ours] = ours, theirs
    return result
