"""Several teachers, each for the prompts of some domains, behind the face of one."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

from topd.errors import ConfigError
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.ragged import Ragged
from topd.rollout.engine import Engine, SamplingParams
from topd.teacher.local import DEFAULT
from topd.teacher.teacher import Check, OneTeacher, Unscored
from topd.types import Prompt, RolloutGroup

T = TypeVar("T")


def routes(domains: Mapping[str, Sequence[str] | None], prompts: Sequence[Prompt]) -> dict[str, str]:
    """Domain -> name of its teacher. Raises ConfigError for one with two teachers, or none. A teacher's None is its own name."""
    teacher_of: dict[str, str] = {}
    for name, own in domains.items():
        for domain in [name] if own is None else own:
            if domain in teacher_of:
                raise ConfigError(
                    f'the domain "{domain}" belongs to teachers.{teacher_of[domain]} and teachers.{name}. Remove one.'
                )
            teacher_of[domain] = name
    unknown = sorted({prompt.domain for prompt in prompts} - teacher_of.keys())
    if unknown:
        raise ConfigError(
            f"no teacher answers for the domain {', '.join(map(repr, unknown))} of the task's prompts; found teachers for "
            f"{', '.join(map(repr, teacher_of))}. Add the domain to `domains` of a [teachers.NAME]."
        )
    return teacher_of


class RoutedTeacher:
    """`teachers` by name; `routes` says which name answers for a domain."""

    def __init__(self, teachers: Mapping[str, OneTeacher], routes: Mapping[str, str]) -> None:
        self.teachers = teachers
        self.routes = routes

    @property
    def honours_temperature(self) -> bool:
        return all(teacher.honours_temperature for teacher in self.teachers.values())

    @property
    def engine_kind(self) -> str:
        kinds = {teacher.engine_kind for teacher in self.teachers.values()}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def context_length(self) -> int | None:
        known = [teacher.context_length for teacher in self.teachers.values() if teacher.context_length is not None]
        return min(known, default=None)

    @property
    def context_note(self) -> str:
        return " ".join(dict.fromkeys(filter(None, (teacher.context_note for teacher in self.teachers.values()))))

    def checks(self, student: LanguageModel, *, asked: bool) -> list[Check]:
        return [
            dataclasses.replace(check, name=f"{check.name} ({name})")
            for name, teacher in self.teachers.items()
            for check in teacher.checks(student, asked=asked)
        ]

    def prefetch(self, groups: Sequence[RolloutGroup]) -> None:
        for name, places in _places(self.routes, [group.prompt for group in groups]).items():
            self.teachers[name].prefetch([groups[i] for i in places])

    @property
    def gives(self) -> Set[str]:
        return frozenset.intersection(*(frozenset(teacher.gives) for teacher in self.teachers.values()))

    def score(
        self,
        groups: Sequence[RolloutGroup],
        wanted: Wanted = DEFAULT,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[Ragged | Unscored]:
        self.prefetch(groups)  # so that all servers work, while the first is waited for
        return _in_order(
            _places(self.routes, [group.prompt for group in groups]),
            lambda name, places: self.teachers[name].score([groups[i] for i in places], wanted, on_tokens=on_tokens),
        )

    def engine(self) -> "RoutedEngine":
        return RoutedEngine({name: teacher.engine() for name, teacher in self.teachers.items()}, self.routes)

    def counts(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for teacher in self.teachers.values():
            total.update(teacher.counts())
        return total


class RoutedEngine:
    """Samples every prompt from the teacher of its domain."""

    kind = "served"
    policy_version = 0
    tolerance: float | None = None
    exact = False
    context_length: int | None = None

    def __init__(self, engines: Mapping[str, Engine], routes: Mapping[str, str]) -> None:
        self.engines = engines
        self.routes = routes

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_groups: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    ) -> list[RolloutGroup]:
        return _in_order(
            _places(self.routes, prompts),
            lambda name, places: self.engines[name].generate(
                [prompts[i] for i in places], params, on_tokens=on_tokens, on_groups=on_groups
            ),
        )

    def load_weights(self, policy_version: int) -> None:
        """No-op: a teacher's weights never change."""

    def describe(self) -> str:
        return ", ".join(f"{name}: {engine.describe()}" for name, engine in self.engines.items())


def _places(routes: Mapping[str, str], prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Name of a teacher -> positions of its prompts."""
    places: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        places.setdefault(routes[prompt.domain], []).append(i)
    return places


def _in_order(places: Mapping[str, list[int]], ask: Callable[[str, list[int]], Sequence[T]]) -> list[T]:
    answers = {i: answer for name, own in places.items() for i, answer in zip(own, ask(name, own), strict=True)}
    return [answers[i] for i in sorted(answers)]
