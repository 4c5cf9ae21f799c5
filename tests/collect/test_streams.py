"""Which log-probs become which stream of a scored group, by what sampled and scored it; what is dropped, and when all stops."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from tests.fakes import make_model, make_prompt, plain_logprobs, scored_groups
from topd.collect.score import Sampler, kept, score
from topd.errors import RunStopped
from topd.evidence import Wanted
from topd.models.language_model import LanguageModel
from topd.ragged import Ragged
from topd.rollout.embedded import EmbeddedEngine
from topd.tasks.grading import Grade, Grader
from topd.teacher.local import DEFAULT, LocalTeacher
from topd.teacher.teacher import Unscored
from topd.types import RolloutGroup, ScoredGroup

TEMPERATURE = 0.7
GROUPS = [dataclasses.replace(scored.group, policy_version=4) for scored in scored_groups((3, 2), (1, 4))]


class SomeEngine(EmbeddedEngine):
    """Engine of some kind; `scorer` scores what it sampled at version 4, None if that is known already."""

    def __init__(self, kind: str, scorer: LanguageModel | None, tolerance: float | None = None) -> None:
        self.kind, self.scorer, self.tolerance = kind, scorer, tolerance
        self.policy_version = 4

    context_length = None

    @property
    def exact(self) -> bool:
        return self.scorer is None


class SomeTeacher(LocalTeacher):
    """Teacher of some kind; gives every token -0.25, and no scores to the groups numbered in `lost`."""

    def __init__(self, kind: str, lost: Sequence[int] = ()) -> None:
        self.engine_kind, self.lost, self.context_length, self.context_note = kind, lost, None, ""

    def score(
        self, groups: Sequence[RolloutGroup], wanted: Wanted = DEFAULT, *, on_tokens: object = None
    ) -> list[Ragged | Unscored]:
        rows = [
            Ragged.of([g.completions]).adding(teacher_logprobs=torch.full((sum(map(len, g.completions)),), -0.25)) for g in groups
        ]
        return [Unscored("it is away") if i in self.lost else row for i, row in enumerate(rows)]


class NoGrader(Grader):
    """Grades are the business of other tests."""

    def __init__(self) -> None:
        self.num_errors = 0

    def submit(self, completion: str, problem: object) -> "Future[Grade]":
        graded: Future[Grade] = Future()
        graded.set_result(Grade(grade=0.0))
        return graded


def ask(
    teacher: SomeTeacher | None, engine: SomeEngine | None, groups: Sequence[RolloutGroup] = GROUPS
) -> list[ScoredGroup | Unscored]:
    return score(groups, grader=NoGrader(), teacher=teacher, sampler=sampler(engine) if engine else None)


def sampler(engine: SomeEngine, moved_on: Sequence[int] = (), max_mismatch_kl: float = 0.1) -> Sampler:
    """`moved_on`: versions whose weights are gone."""
    model = engine.scorer or make_model()
    return Sampler(
        engine=engine,
        policy=model,
        weights_of=lambda version: None if version in moved_on else model,
        temperature=TEMPERATURE,
        max_tokens=64,
        max_mismatch_kl=max_mismatch_kl,
    )


def sampled(group: RolloutGroup) -> list[list[float]]:
    return [rollout.logprobs.tolist() for rollout in group.rollouts]


def values(stream: Sequence[Tensor]) -> list[list[float]]:
    return [part.tolist() for part in stream]


@pytest.mark.parametrize(
    ("by", "taught_by", "recomputed", "behaviour"),
    [
        ("embedded", "embedded", False, "sampled"),
        ("embedded", "embedded", True, "own"),  # bfloat16: both sides as the trainer computes them
        ("vllm", "vllm", True, "sampled"),  # one engine's noise on both sides of the reward
        ("vllm", "embedded", True, "own"),
        ("vllm", "other", True, "own"),
        ("vllm", None, True, "own"),
    ],
)
def test_streams_by_kind(by: str, taught_by: str | None, recomputed: bool, behaviour: str) -> None:
    model = make_model()
    found = ask(SomeTeacher(taught_by) if taught_by else None, SomeEngine(by, model if recomputed else None))
    for scored, group in zip(found, GROUPS, strict=True):
        assert isinstance(scored, ScoredGroup)
        plain = [plain_logprobs(model.module, group.prompt_ids, c, temperature=TEMPERATURE) for c in group.completions]
        own = [part.tolist() for part in plain] if recomputed else sampled(group)
        for name, expected in (("old", own), ("behaviour", sampled(group) if behaviour == "sampled" else own)):
            for part, wanted in zip(scored.evidence.by_rollout(f"{name}_logprobs"), expected, strict=True):
                assert part.tolist() == pytest.approx(wanted, abs=1e-5), name
        if taught_by is None:
            assert "teacher_logprobs" not in scored.evidence
        else:
            assert values(scored.evidence.by_rollout("teacher_logprobs")) == [[-0.25] * len(c) for c in group.completions]


def test_what_other_weights_sampled_is_dropped_and_nothing_else() -> None:
    """Sampled log-probs within the tolerance of the trainer's pass, on whichever side; beyond it the group is dropped."""
    model = make_model()

    def group(off: float) -> RolloutGroup:
        exact = [plain_logprobs(model.module, GROUPS[0].prompt_ids, c, temperature=TEMPERATURE) for c in GROUPS[0].completions]
        pairs = zip(GROUPS[0].rollouts, exact, strict=True)
        rollouts = tuple(dataclasses.replace(rollout, logprobs=part.detach() + off) for rollout, part in pairs)
        return dataclasses.replace(GROUPS[0], rollouts=rollouts)

    groups = [group(off) for off in (0.0, 0.09, -0.09, 0.11, -0.11)]
    found = ask(SomeTeacher("embedded"), SomeEngine("vllm", model, tolerance=0.1), groups)
    assert [isinstance(each, Unscored) for each in found] == [False, False, False, True, True]
    found = ask(SomeTeacher("embedded"), SomeEngine("vllm", model), groups)
    assert not any(isinstance(each, Unscored) for each in found)


def test_a_group_whose_weights_have_moved_on_keeps_the_engines_numbers_unless_the_policy_is_too_far() -> None:
    model = make_model()
    old, new = (dataclasses.replace(group, policy_version=version) for group, version in zip(GROUPS, (2, 4), strict=True))
    wide = sampler(SomeEngine("vllm", model), moved_on=[2], max_mismatch_kl=1e3)
    kept_numbers, recomputed = wide.ratio_logprobs([old, new])
    assert [part.tolist() for part in kept_numbers] == sampled(old)
    assert [part.tolist() for part in recomputed] != sampled(new)
    dropped, recomputed_too = sampler(SomeEngine("vllm", model), moved_on=[2], max_mismatch_kl=1e-3).ratio_logprobs([old, new])
    assert isinstance(dropped, Unscored)
    assert "rollout.max_mismatch_kl = 0.001" in dropped.reason
    for part, again in zip(recomputed, recomputed_too, strict=True):
        assert torch.equal(part, again)


def test_the_bound_is_on_the_kl_from_the_sampling_weights_to_the_policy() -> None:
    """k3 by hand: the policy's log-probs are 0.3 nats below those sampled, exp(-0.3) - 1 + 0.3 = 0.0408."""
    model = make_model()
    exact = [plain_logprobs(model.module, GROUPS[0].prompt_ids, c, temperature=TEMPERATURE) for c in GROUPS[0].completions]
    pairs = zip(GROUPS[0].rollouts, exact, strict=True)
    group = dataclasses.replace(
        GROUPS[0], rollouts=tuple(dataclasses.replace(rollout, logprobs=part.detach() + 0.3) for rollout, part in pairs)
    )
    for bound, is_kept in ((0.0405, False), (0.0412, True)):
        [row] = sampler(SomeEngine("vllm", model), moved_on=[4], max_mismatch_kl=bound).ratio_logprobs([group])
        assert isinstance(row, Unscored) is not is_kept


def test_a_group_without_scores_is_marked_with_its_reason_in_its_place() -> None:
    first, second = ask(SomeTeacher("other", lost=[0]), SomeEngine("embedded", None))
    assert first == Unscored("it is away")
    assert isinstance(second, ScoredGroup)
    assert second.group is GROUPS[1]


def group_of(domain: str) -> RolloutGroup:
    return dataclasses.replace(GROUPS[0], prompt=dataclasses.replace(make_prompt((3, 4)), domain=domain))


def outcome(lost: dict[str, tuple[int, int]], shares: dict[str, float], teacher_of: dict[str, str]) -> int | str:
    """`lost`: domain -> (groups lost, groups in all). How many are kept, or the words of the stop."""
    groups = [group_of(domain) for domain, (_, total) in lost.items() for _ in range(total)]
    scored = [
        Unscored("away") if i < number else dataclasses.replace(scored_groups((1,))[0], group=group_of(domain))
        for domain, (number, total) in lost.items()
        for i in range(total)
    ]
    try:
        return len(kept(groups, scored, max_dropped_share=shares, teacher_of=teacher_of))
    except RunStopped as error:
        return str(error)


def test_up_to_the_share_is_dropped_and_one_more_stops_the_run() -> None:
    assert outcome({"x": (0, 4)}, {"teacher": 0.0}, {}) == 4
    assert outcome({"x": (1, 4)}, {"teacher": 0.25}, {}) == 3
    assert "2 of the step's 4 groups could not be scored (teacher.max_dropped_share = 0.25): away (x2)" in outcome(
        {"x": (2, 4)}, {"teacher": 0.25}, {}
    )
    assert "1 of the step's 4" in outcome({"x": (1, 4)}, {"teacher": 0.0}, {})
    assert "1 of the step's 4" in outcome({"x": (1, 4)}, {}, {})  # without a teacher nothing may be lost
    assert "4 of the step's 4" in outcome({"x": (4, 4)}, {"teacher": 1.0}, {})  # nothing is left to train on


def test_each_teacher_has_its_own_share() -> None:
    routes, shares = {"x": "a", "y": "b"}, {"a": 0.5, "b": 0.0}
    assert outcome({"x": (1, 2), "y": (0, 8)}, shares, routes) == 9
    assert "1 of the step's 8 groups could not be scored (teachers.b.max_dropped_share = 0)" in outcome(
        {"x": (0, 2), "y": (1, 8)}, shares, routes
    )
