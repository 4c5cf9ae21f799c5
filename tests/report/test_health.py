"""Each verdict appears exactly where it should: a failure is put into a healthy run, and nothing else may be said of it."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from topd import algorithms, config_keys
from topd.errors import ConfigError
from topd.report.health import checks as health
from topd.report.health import learning, service, verdict
from topd.report.health.checks import LEVELS, Verdict, verdicts
from topd.report.health.verdict import MIN_STEPS, Series, change
from topd.report.stored import Check, CreditFacts, StoredRun, is_evaluation
from topd.report.stored_step import StoredGroup, StoredRollout, StoredStep
from topd.run.catalogue import METRICS, NAMES
from topd.run.healthy import HEALTHY, of_case

CONFIG: dict[str, Any] = {
    "algorithm": {"type": "topd", "alpha": 0.2, "reward": "proximal"},
    "rollout": {"prompts_per_step": 64, "group_size": 8, "max_completion_tokens": 64, "max_lag": 0},
    "run": {"steps": 12},
}
UNBOUNDED = {**CONFIG, "algorithm": {"type": "opd", "clip": 0.2}}
Rows = list[dict[str, Any]]


def healthy_row(i: int) -> dict[str, Any]:
    """Step i of 12: everything as a practitioner would want it, with some noise."""
    noise = 1 + 0.02 * (-1) ** i
    gap = 0.8 * 0.85**i * noise
    return {
        "step": i + 1,
        "policy_version": 8 * (i + 1),
        "grade/mean": min(1.0, (0.1 + 0.03 * i) * noise),
        "grade/std_in_group": 0.3,
        "grade/grader_errors": 0,
        "token_reward/mean": -0.01 / (i + 1),
        "token_reward/floor_share": 0.03,
        "token_reward/std_in_group": 0.1,
        "teacher/gap": gap,
        "teacher/log_ratio_p01": -8.0,
        "teacher/log_ratio_p50": 0.0,
        "teacher/log_ratio_p99": 1.0,
        "teacher/dropped_groups": 0,
        "teacher/requests": 100,
        "teacher/retries": 0,
        "advantage/degenerate_groups": 0.0,
        "ratio/p01": 0.7,
        "ratio/p50": 1.0,
        "ratio/p99": 1.2,
        "ratio/clip_share": 0.02,
        "policy/entropy": 0.2 * noise,
        "policy/mismatch_kl": 1e-12,
        "policy/lag": 0,
        "completion/mean_length": 28.0 * noise,
        "completion/max_length": 47,
        "completion/truncation_rate": 0.01,
        "train/loss": -0.01,
        "train/grad_norm": 3.0,
        "train/grad_norm_max": 5.0,
        "train/learning_rate": 5e-4,
        "train/updates": 8,
        "tokens/rollout": 14_000,
        "tokens/total": 14_000 * (i + 1),
        "seconds/rollout": 0.5,
        "seconds/teacher": 1.0,
        "seconds/update": 0.9,
        "seconds/step": 2.5,
        "memory/peak": 0.7,
    }


def healthy_rows() -> Rows:
    return [healthy_row(i) for i in range(12)]


def scored(
    model: str, step: int, value: float, *, width: float = 0.04, benchmark: str = "held_out", **more: Any
) -> dict[str, Any]:
    row = {"model": model, "step": step, "benchmark": benchmark, "avg_at_k": value, "ci95": [value - width, value + width]}
    return {**row, "k": 16, "problems": 128, "mean_length": 27.0, **more}


EVALUATIONS = [scored("student", 0, 0.11), scored("teacher", 0, 0.98), scored("student", 12, 0.57)]


def facts_of(config: Mapping[str, Any]) -> CreditFacts | None:
    with contextlib.suppress(ConfigError, ValidationError, KeyError, TypeError):
        algorithm = config["algorithm"]
        return CreditFacts.model_validate(algorithms.load(algorithm["type"]).Config(**algorithm).describe())
    return None


def a_run(
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    evaluations: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] = CONFIG,
    summary: Mapping[str, Any] | None = {},
    problems: Sequence[str] = (),
) -> StoredRun:
    return StoredRun(
        path=Path("run"),
        config=config,
        credit=facts_of(config),
        environment={},
        metrics=tuple(healthy_rows() if rows is None else rows),
        evaluations=tuple(EVALUATIONS if evaluations is None else evaluations),
        summary=summary,
        rescores=(),
        steps=(),
        problems=list(problems),
    )


def with_series(**changed: Any) -> Rows:
    """Healthy rows with some metrics changed: a value for all steps, or one per step. `__` stands for the slash."""
    rows = healthy_rows()
    for name, values in changed.items():
        for i, row in enumerate(rows):
            row[name.replace("__", "/")] = values[i] if isinstance(values, list) else values
    return rows


def without(*names: str) -> Rows:
    return [{name: value for name, value in row.items() if name not in names} for row in healthy_rows()]


def a_step(
    end: float = 0.0, other: float = -0.2, *, completions: int = 40, finish: str = "stop", big: float = 1.0, step: int = 1
) -> StoredStep:
    """One group of completions of 10 tokens: log-ratio `end` on the last, `other` before; 1 % of advantages are `big`."""
    rollouts = []
    for i in range(completions):
        advantages = np.ones(10, np.float32)
        if i % 10 == 0:
            advantages[0] = big
        streams = {"log_ratio": np.array([other] * 9 + [end], np.float32), "advantage": advantages}
        rollouts.append(StoredRollout(index=i, text="", token_ids=(3,) * 10, finish_reason=finish, grade=0.0, streams=streams))
    group = StoredGroup(index=0, prompt_id="p", domain="", prompt="", answer=None, policy_version=0, rollouts=tuple(rollouts))
    return StoredStep(step=step, groups=(group,))


def titles(found: Sequence[Verdict], *levels: str) -> list[str]:
    return [each.title for each in found if not levels or each.level in levels]


def bad_things(run: StoredRun, steps: Sequence[StoredStep] = ()) -> dict[str, str]:
    """Title -> level of all that is not good."""
    return {each.title: each.level for each in verdicts(run, steps) if each.level != "good"}


def test_a_healthy_run_gets_good_verdicts_only() -> None:
    found = verdicts(a_run(), [a_step()])
    assert bad_things(a_run(), [a_step()]) == {}
    assert titles(found) == [
        "The run is finished",
        "Accuracy rose",
        "The teacher has something to teach",
        "The gap to the teacher falls",
        "Grades rise",
        "Length is steady",
        "Few completions are cut off",
        "Entropy has neither collapsed nor grown",
        "The teacher accepts the end token",
        "Credit is spread over the tokens",
        "Few tokens are rejected",
        "The heavy tail is bounded",
        "The policy moves at a measured pace",
        "Engine and trainer agree",
        "Gradients do not spike",
        "Groups carry a signal",
        "No group was dropped",
        "The teacher's servers answered",
        "The grader never raised",
        "Sampling weights are as new as they should be",
        "Where the time goes",
        "The run does not get slower",
        "Memory is steady",
    ]
    assert all(each.advice == "" for each in found)


GROWING = [28.0, 30, 40, 60, 90, 130, 160, 180, 190, 200, 205, 211]
FALLING = [0.6, 0.6, 0.6, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3, 0.3, 0.3]
FLAT = 0.5

FAILURES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"completion__mean_length": GROWING}, {"Completions run away in length": "bad"}),
    ({"completion__mean_length": [28.0] * 4 + [35.0] * 4 + [43.0] * 4}, {"Completions run away in length": "warning"}),
    ({"completion__mean_length": [28.0] * 4 + [20.0] * 4 + [5.0] * 4}, {"Completions collapse in length": "warning"}),
    ({"completion__truncation_rate": 0.38}, {"Completions are cut off": "bad"}),
    ({"completion__truncation_rate": 0.06}, {"Completions are cut off": "warning"}),
    ({"teacher__gap": [0.2 + 0.05 * i for i in range(12)]}, {"The gap to the teacher rises": "bad"}),
    ({"teacher__gap": [0.5, 0.52, 0.48] * 4}, {"The gap to the teacher does not fall": "warning"}),
    ({"teacher__gap": [0.8, 0.7, 0.6, 0.5] + [0.3] * 8}, {"The gap fell, then stopped falling": "note"}),
    ({"teacher__gap": -0.3}, {"The gap to the teacher is negative": "warning"}),
    ({"grade__mean": FALLING}, {"Closer to the teacher, but less often right": "bad"}),
    ({"grade__mean": FALLING, "teacher__gap": 0.005}, {"Grades fall": "warning"}),
    ({"grade__mean": 0.0}, {"No completion earned a grade": "note"}),
    ({"policy__entropy": [0.2] * 6 + [0.001] * 6}, {"Entropy has collapsed": "warning"}),
    ({"policy__entropy": [0.2] * 4 + [0.5] * 8}, {"Entropy grows": "warning"}),
    ({"token_reward__floor_share": 0.3}, {"The teacher rejects many tokens": "warning"}),
    ({"teacher__log_ratio_p99": 4.0}, {"Some tokens are pulled up hard": "note"}),
    ({"ratio__clip_share": 0.3}, {"The policy moves too fast": "warning"}),
    ({"ratio__p01": 0.1}, {"The policy moves too fast": "warning"}),
    ({"ratio__p99": 3.0}, {"The policy moves too fast": "warning"}),
    ({"policy__mismatch_kl": 0.02}, {"Engine and trainer disagree": "warning"}),
    ({"policy__mismatch_kl": 0.5}, {"Engine and trainer disagree": "bad"}),
    ({"policy__lag": 8}, {"Sampling weights are too old": "warning"}),
    ({"train__grad_norm_max": [5.0] * 11 + [40.0]}, {"Gradients spike": "note"}),
    ({"train__grad_norm_max": [5.0] * 10 + [40.0] * 2}, {"Gradients spike": "warning"}),
    ({"train__grad_norm_max": [5.0] * 11 + [4000.0]}, {"Gradients spike": "warning"}),
    ({"train__grad_norm": 1e-6, "train__grad_norm_max": 1e-6}, {"There is almost no gradient": "warning"}),
    ({"advantage__degenerate_groups": 0.7}, {"Most groups carry no signal": "warning"}),
    ({"teacher__dropped_groups": [0] * 11 + [2]}, {"Groups were dropped": "note"}),
    ({"teacher__dropped_groups": 2}, {"Groups were dropped": "warning"}),
    ({"teacher__retries": 1}, {"The teacher's servers failed at times": "note"}),
    ({"teacher__retries": 20}, {"The teacher's servers failed at times": "warning"}),
    ({"grade__grader_errors": [0] * 11 + [3]}, {"The grader raises": "warning"}),
    ({"seconds__teacher": 40.0, "seconds__step": 42.0}, {"One phase takes nearly all the time": "note"}),
    ({"seconds__step": [2.5] * 4 + [3.0] * 4 + [5.0] * 4}, {"The run gets slower": "warning"}),
    ({"memory__peak": [1.0] * 4 + [1.2] * 4 + [1.5] * 4}, {"Memory grows": "note"}),
    ({"train__loss": [None] + [0.1] * 11}, {"Some metrics are not numbers": "bad"}),
    ({"completion__max_length": ["long"] + [40] * 11}, {"Some metrics are not numbers": "note"}),
    ({"teacher__gap": [None] + [0.8 * 0.8**i for i in range(11)]}, {"The gap is infinite in some steps": "note"}),
]


@pytest.mark.parametrize(("changed", "expected"), FAILURES, ids=lambda part: str(next(iter(part)))[:40])
def test_a_failure_gets_its_verdict_and_no_other(changed: dict[str, Any], expected: dict[str, str]) -> None:
    assert bad_things(a_run(with_series(**changed)), [a_step()]) == expected


def test_words_say_what_was_seen_with_steps_and_what_to_try() -> None:
    rows = with_series(completion__mean_length=GROWING, completion__truncation_rate=0.38)
    found = next(each for each in verdicts(a_run(rows)) if each.title == "Completions run away in length")
    assert found.words == (
        "Mean length went from 35 tokens (median of steps 1 to 4) to 202 tokens (median of steps 9 to 12). The teacher's own "
        "completions have 27 on held-out problems. 38.0 % were cut off (median of steps 9 to 12). The teacher punishes "
        "stopping, or rewards repetition."
    )
    assert "teacher.map_eos" in found.advice
    assert found.metrics == ("completion/mean_length",)
    assert [(each.value, each.where) for each in found.evidence] == [("35", "steps 1 to 4"), ("202", "steps 9 to 12")]


ENDS_OF_RANGES = [
    ("token_reward/floor_share", "high", "The teacher rejects many tokens"),
    ("advantage/degenerate_groups", "high", "Most groups carry no signal"),
    ("ratio/clip_share", "high", "The policy moves too fast"),
    ("ratio/p01", "low", "The policy moves too fast"),
    ("ratio/p99", "high", "The policy moves too fast"),
    ("policy/entropy", "low", "Entropy has collapsed"),
    ("policy/mismatch_kl", "high", "Engine and trainer disagree"),
    ("completion/truncation_rate", "high", "Completions are cut off"),
    ("train/grad_norm", "low", "There is almost no gradient"),
    ("teacher/log_ratio_p01", "low", "The heavy tail is not bounded"),
    ("teacher/log_ratio_p99", "high", "Some tokens are pulled up hard"),
    ("teacher/dropped_groups", "high", "Groups were dropped"),
    ("teacher/retries", "high", "The teacher's servers failed at times"),
    ("grade/grader_errors", "high", "The grader raises"),
    ("grade/std_in_group", "low", "All grades of a group are equal"),
    ("teacher/gap", "low", "The gap to the teacher is negative"),
]


@pytest.mark.parametrize(("name", "end", "title"), ENDS_OF_RANGES, ids=lambda part: str(part))
def test_the_ends_of_a_range_are_inside_and_what_is_beyond_gets_the_verdict(name: str, end: str, title: str) -> None:
    bound = getattr(HEALTHY[name], end)
    beyond = math.nextafter(bound, math.inf if end == "high" else -math.inf)
    for value, expected in ((bound, False), (beyond, True)):
        rows = with_series(**{name: value})
        if name == "teacher/log_ratio_p01":
            rows = [{**row, "token_reward/mean": -row["teacher/gap"]} for row in rows]
        if name == "grade/std_in_group":  # only where credit comes from grades
            rows = [{key: number for key, number in row.items() if not key.startswith(("teacher/", "token_"))} for row in rows]
        config = UNBOUNDED if name == "teacher/log_ratio_p01" else CONFIG
        assert (title in bad_things(a_run(rows, config=config))) is expected, value


def test_every_range_has_a_boundary_test() -> None:
    """So that no number stands in the catalogue that no verdict looks at."""
    ranges = {(name, end) for name, healthy in HEALTHY.items() for end in ("low", "high") if getattr(healthy, end) is not None}
    assert ranges == {(name, end) for name, end, _ in ENDS_OF_RANGES}


def test_accuracy_is_judged_by_whether_intervals_overlap() -> None:
    base, teacher = scored("student", 0, 0.25, width=0.0625), scored("teacher", 0, 0.75, width=0.0625)

    def judge(after: float, **more: Any) -> Verdict:
        found = verdicts(a_run(evaluations=[base, teacher, scored("student", 12, after, width=0.0625)], **more))
        return next(each for each in found if "ccuracy" in each.title)

    rose = judge(0.5)
    assert (rose.title, rose.level) == ("Accuracy rose", "good")
    assert "That closes 50.0 % of the distance to the teacher's 75.0 %." in rose.words
    for touching in (0.375, 0.125):
        found = judge(touching)
        assert (found.title, found.level) == ("No change of accuracy was shown", "warning")
        assert "overlap: no change was shown" in found.words
        assert "128 problems, 16 samples each" in found.words
    assert judge(0.376).title == "Accuracy rose"
    assert judge(0.124).title == "Accuracy fell"
    fell = bad_things(a_run(evaluations=[base, teacher, scored("student", 12, 0.1, width=0.0625)]))
    assert fell == {"Accuracy fell": "bad", "Closer to the teacher, but less often right": "bad"}
    assert judge(0.26, summary=None).level == "note", "an unfinished run may still learn"
    assert judge(0.26, rows=healthy_rows()[:3]).level == "note", "so may one of a few steps"


def test_a_teacher_that_has_nothing_to_teach_is_named() -> None:
    student = [scored("student", 0, 0.5), scored("student", 12, 0.8)]
    for value, expected in ((0.55, "The teacher is not clearly better"), (0.3, "The teacher is worse than the student was")):
        found = verdicts(a_run(evaluations=[*student, scored("teacher", 0, value)]))
        assert expected in titles(found, "bad", "warning")
        assert not any("closes" in each.words for each in found), "there is no distance to close"


def test_an_earlier_evaluation_must_be_clearly_better() -> None:
    base = scored("student", 0, 0.1)
    for best, expected in ((0.9, "An earlier step was better"), (0.54, "No earlier step was clearly better"), (0.4, "The last ")):
        found = verdicts(a_run(evaluations=[base, scored("student", 6, best), scored("student", 12, 0.5)]))
        assert any(title.startswith(expected) for title in titles(found))
    assert "checkpoint of step 6" in next(
        each.advice
        for each in verdicts(a_run(evaluations=[base, scored("student", 6, 0.9), scored("student", 12, 0.5)]))
        if each.title == "An earlier step was better"
    )


def test_benchmarks_are_judged_one_by_one() -> None:
    rows = [scored("student", step, value, benchmark=name) for name, value in (("a", 0.2), ("b", 0.4)) for step in (0, 12)]
    rows[1]["avg_at_k"], rows[1]["ci95"] = 0.9, [0.85, 0.95]
    found = verdicts(a_run(evaluations=rows))
    assert [each.words[:2] for each in found if each.title == "Accuracy rose"] == ["a:"]
    assert [each.words[:2] for each in found if each.title == "No change of accuracy was shown"] == ["b:"]


def test_without_a_second_evaluation_nothing_is_said_about_accuracy() -> None:
    for evaluations in ([], [scored("student", 0, 0.1)], [scored("teacher", 0, 0.9)]):
        assert "Accuracy before and after is not there" in titles(verdicts(a_run(evaluations=evaluations)), "note")


@pytest.mark.parametrize(
    ("step", "title", "level"),
    [
        (a_step(end=-9.0), "The teacher punishes the end token", "bad"),
        (a_step(end=-math.inf), "The teacher punishes the end token", "bad"),
        (a_step(end=-9.0, other=-5.0), "The teacher accepts the end token", "good"),
        (a_step(end=math.log(0.11)), "The teacher accepts the end token", "good"),
        (a_step(end=2.0), "The teacher wants earlier ends", "note"),
        (a_step(end=-9.0, completions=19), "The teacher on the end token", "note"),
        (a_step(end=-9.0, finish="length"), "The teacher on the end token", "note"),
    ],
)
def test_the_teacher_on_the_end_token(step: StoredStep, title: str, level: str) -> None:
    """All tokens rejected alike is no matter of the end token; neither is a token at 11 % of the student's probability."""
    found = [each for each in verdicts(a_run(), [step]) if "end" in each.title.split() or "ends" in each.title.split()]
    assert [(each.title, each.level) for each in found] == [(title, level)]


def test_the_share_of_punished_ends_counts_not_a_few_of_them() -> None:
    """19 of 40 is no pattern, 20 of 40 is one; counts, means and advantages are in the evidence."""
    for punished, expected in ((19, "accepts"), (20, "punishes")):
        group = a_step(end=-9.0, completions=punished).groups[0]
        step = StoredStep(step=7, groups=(group, a_step(completions=40 - punished).groups[0]))
        found = next(each for each in verdicts(a_run(), [step]) if "the end token" in each.title)
        assert expected in found.title
        assert "40 completions that ended by themselves in step 7" in found.words
        assert f"{100 * punished / 40:.1f} %" in found.words
        labels = {each.label: each.value for each in found.evidence}
        assert labels["mean log-ratio of end tokens"] == f"{-9 * punished / 40:.3g}"
        assert labels["mean advantage of end tokens"] == "1"


@pytest.mark.parametrize(("big", "level"), [(60.0, "good"), (70.0, "note"), (140.0, "note"), (160.0, "warning")])
def test_credit_that_a_few_tokens_hold(big: float, level: str) -> None:
    """4 of 400 tokens hold big / (big + 99): 38 %, 41 %, 59 % and 62 %."""
    found = next(each for each in verdicts(a_run(), [a_step(big=big)]) if "largest advantages" in each.words)
    assert found.level == level
    assert f"{100 * big / (big + 99):.1f} % of all credit" in found.words
    assert "The 4 tokens (1.0 % of 400 in step 1)" in found.words


def test_a_heavy_tail_is_dangerous_only_without_a_floor() -> None:
    rows = [{**row, "token_reward/mean": -row["teacher/gap"]} for row in with_series(teacher__log_ratio_p01=-15.0)]
    assert bad_things(a_run(rows, config=UNBOUNDED)) == {"The heavy tail is not bounded": "warning"}
    bounded = next(each for each in verdicts(a_run(rows)) if "tail" in each.title)
    assert (bounded.level, bounded.title) == ("good", "The heavy tail is bounded")
    assert "below -0.223" in bounded.words
    other = with_series(teacher__log_ratio_p01=-15.0)
    assert bad_things(a_run(other, config=UNBOUNDED)) == {"The tail is heavy": "note"}, (
        "another reward: not known to be unbounded"
    )


def test_an_infinite_gap_is_bad_only_without_a_floor() -> None:
    rows = with_series(teacher__gap=[None] + [0.8 * 0.8**i for i in range(11)])
    assert bad_things(a_run(rows, config=UNBOUNDED)) == {"The gap is infinite in some steps": "bad"}


STOPPED = dict(ratio__p01=0.9995, ratio__p99=1.0005, ratio__clip_share=0.0, teacher__gap=FLAT)


def test_a_policy_that_stands_still_with_a_gap_has_stopped_moving() -> None:
    still = {"The policy has stopped moving": "warning", "The gap to the teacher does not fall": "warning"}
    assert bad_things(a_run(with_series(**STOPPED))) == still
    for moving in (dict(teacher__gap=[0.8 * 0.8**i for i in range(12)]), dict(ratio__p99=1.0011), dict(train__updates=1)):
        assert "The policy has stopped moving" not in bad_things(a_run(with_series(**{**STOPPED, **moving}))), moving


def test_why_a_policy_stands_still() -> None:
    def advice(**more: Any) -> str:
        found = verdicts(a_run(with_series(**STOPPED, **more)))
        return next(each.advice for each in found if each.title == "The policy has stopped moving")

    assert "trainer.learning_rate" in advice()
    assert "different models" in advice(train__grad_norm=1e-9)


def test_one_update_a_step_says_nothing_about_ratios() -> None:
    rows = with_series(train__updates=1, ratio__p01=1.0, ratio__p99=1.0, ratio__clip_share=0.0)
    assert not any("policy moves" in title for title in titles(verdicts(a_run(rows))))


def test_grades_alone_without_a_teacher() -> None:
    rows = without(*(name for name in NAMES if name.startswith(("teacher/", "token_reward/"))))
    assert bad_things(a_run(rows)) == {}
    rows = [{**row, "grade/std_in_group": 0.0, "advantage/degenerate_groups": 1.0} for row in rows]
    assert bad_things(a_run(rows)) == {"All grades of a group are equal": "bad"}


def test_equal_grades_do_not_matter_where_a_teacher_scores() -> None:
    assert bad_things(a_run(with_series(grade__std_in_group=0.0))) == {}


def test_infinities_of_both_signs_have_no_mean_and_no_warning() -> None:
    step = StoredStep(step=1, groups=(a_step(end=math.inf).groups[0], a_step(end=-math.inf).groups[0]))
    assert "The teacher punishes the end token" in bad_things(a_run(), [step])


def test_demonstrations_are_judged_by_their_loss() -> None:
    """No policy is sampled from: length, truncation, grades and signal are those of the data."""
    names = [
        name for name in NAMES if name.startswith(("teacher/", "token_reward/", "policy/l", "policy/m", "policy/e", "ratio/"))
    ]
    spoilt = {"completion/mean_length": 1.0, "grade/std_in_group": 0.0, "advantage/degenerate_groups": 1.0, "grade/mean": 0.0}
    rows = [{**row, **spoilt, "train/loss": 1.0 - 0.05 * i} for i, row in enumerate(without(*names))]
    assert bad_things(a_run(rows), [a_step(big=1e6)]) == {}
    assert "The loss falls" in titles(verdicts(a_run(rows)), "good")
    rising = [{**row, "train/loss": 1.0 + 0.05 * i} for i, row in enumerate(rows)]
    assert bad_things(a_run(rising)) == {"The loss rises": "bad"}


def test_the_teachers_length_is_what_the_students_may_become() -> None:
    longer = [scored("student", 0, 0.1), scored("teacher", 0, 0.9, mean_length=200.0), scored("student", 12, 0.8)]
    found = verdicts(a_run(with_series(completion__mean_length=GROWING), evaluations=longer))
    assert "Length goes to the teacher's" in titles(found, "good")


def test_lag_of_one_step_is_allowed_where_the_settings_say_so() -> None:
    config = {**CONFIG, "rollout": {**CONFIG["rollout"], "max_lag": 1}}
    assert bad_things(a_run(with_series(policy__lag=8), config=config)) == {}
    assert bad_things(a_run(with_series(policy__lag=9), config=config)) == {"Sampling weights are too old": "warning"}


def test_one_noisy_step_makes_no_verdict() -> None:
    """Except for spikes and counts, which say so."""
    quiet = {"grade/mean", "step", "policy_version", "train/updates", "train/grad_norm_max", "seconds/step", "tokens/rollout"}
    for name in sorted(healthy_row(0).keys() - quiet - {"grade/grader_errors", "teacher/dropped_groups", "teacher/retries"}):
        for i in (0, 5, 10, 11):
            for factor in (100.0, -100.0, 0.0):
                rows = healthy_rows()
                rows[i][name] = rows[i][name] * factor
                found = titles(verdicts(a_run(rows)), "bad", "warning")
                assert found == [] or name.startswith("seconds/"), (name, i, factor)


def test_state_of_the_run() -> None:
    assert bad_things(a_run(summary=None)) == {"The run is not finished": "note"}
    assert "12 of 12 steps" in next(each.words for each in verdicts(a_run(summary=None)) if each.level == "note")
    assert bad_things(a_run(problems=["metrics.jsonl, line 3 is damaged"])) == {
        "Parts of the run folder are missing or damaged": "warning"
    }
    few = bad_things(a_run(healthy_rows()[: MIN_STEPS - 1], summary=None))
    assert few == {"Too few steps to judge": "note", "The run is not finished": "note"}
    assert "Too few steps to judge" not in bad_things(a_run(healthy_rows()[:MIN_STEPS], summary=None))


def test_few_steps_make_no_trend_and_no_steps_make_little() -> None:
    rows = [{**healthy_row(i), "teacher/gap": 0.2 + i, "completion/mean_length": 10.0 * (i + 1)} for i in range(MIN_STEPS - 1)]
    assert not any(word in " ".join(titles(verdicts(a_run(rows)))) for word in ("gap", "length", "slower", "Memory"))
    empty = bad_things(a_run([], evaluations=[], summary=None, config={}))
    assert set(empty.values()) == {"note"}
    assert "Too few steps to judge" in empty


def test_a_change_counts_if_it_is_large_and_no_work_of_chance() -> None:
    def series(*values: float) -> Any:
        found = change(Series(steps=tuple(range(1, len(values) + 1)), values=values))
        assert found is not None
        return found

    assert series(1.0, 1.0, 1.5, 1.5).rises(0.5)
    assert not series(1.0, 1.0, 1.5, 1.5).rises(0.51)
    assert series(-1.0, -1.0, -0.5, -0.5).rises(0.5)
    assert series(2.0, 2.0, 1.0, 1.0).falls(0.5)
    assert not series(2.0, 2.0, 1.0, 1.0).falls(0.51)
    assert not series(2.0, 2.0, 2.0, 2.0).falls(0.0)
    assert not series(1.0, 3.0, 2.0, 5.0, 9.0, 2.5, 2.6, 0.1, 9.0).rises(0.1), "too few pairs are ordered alike"
    assert change(Series(steps=(1, 2, 3), values=(1.0, 2.0, 3.0))) is None
    long = series(*map(float, range(100)))
    assert long.early.range == (1, 33)
    assert long.late.range == (91, 100)


def test_levels_are_sorted_worst_first_and_every_verdict_is_complete() -> None:
    rows = with_series(completion__mean_length=GROWING, policy__mismatch_kl=0.02, grade__mean=0.0, teacher__retries=1)
    found = verdicts(a_run(rows, problems=["x"]), [a_step(end=-9.0)])
    ranks = [LEVELS.index(each.level) for each in found]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2, 3}
    for each in found:
        assert not each.words[0].islower() or ":" in each.words
        assert each.words.endswith(".")
        assert "  " not in each.words
        assert set(each.metrics) <= NAMES
        assert (
            each.advice
            if each.level in ("bad", "warning") and each.title != "Parts of the run folder are missing or damaged"
            else True
        )


VALUES = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-2, 2),
    st.integers(-3, 10**6),
    st.text(max_size=3),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
)
ROWS = st.lists(st.dictionaries(st.sampled_from(sorted(NAMES - {"step"})), VALUES, max_size=12), max_size=14)
EVALUATION = st.fixed_dictionaries(
    {
        "step": st.integers(-1, 20),
        "avg_at_k": VALUES,
        "ci95": st.one_of(VALUES, st.lists(VALUES, min_size=2, max_size=2), st.just([0.1, 0.2])),
        "model": st.one_of(VALUES, st.sampled_from(["student", "teacher"])),
        "benchmark": VALUES,
        "mean_length": VALUES,
    }
)
STREAM = st.lists(st.floats(width=32), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    rows=ROWS,
    evaluations=st.lists(EVALUATION, max_size=5),
    floor=st.booleans(),
    streams=st.lists(STREAM, max_size=4),
    values=st.lists(VALUES, min_size=4, max_size=4),
)
def test_nothing_that_a_folder_may_hold_raises(
    rows: Rows, evaluations: list[Any], floor: bool, streams: list[list[float]], values: list[Any]
) -> None:
    numbered = [{**row, "step": i} for i, row in enumerate(rows, 1)]
    config = {**(CONFIG if floor else UNBOUNDED), "rollout": dict(zip(CONFIG["rollout"], values, strict=True))}
    rollouts = tuple(
        StoredRollout(
            index=i,
            text="",
            token_ids=(1,) * len(stream),
            finish_reason="stop" if i % 2 else "length",
            grade=0.0,
            streams={name: np.array(stream, np.float32) for name in ("log_ratio", "advantage")[: 1 + i % 2]},
        )
        for i, stream in enumerate(streams)
    )
    group = StoredGroup(index=0, prompt_id="p", domain="", prompt="", answer=None, policy_version=0, rollouts=rollouts)
    run = a_run(numbered, evaluations=[row for row in evaluations if is_evaluation(row)], config=config)
    found = verdicts(run, [StoredStep(step=1, groups=(group,)), StoredStep(step=2, groups=())])
    ranks = [LEVELS.index(each.level) for each in found]
    assert ranks == sorted(ranks)
    assert all(each.words and each.title for each in found)


def every_text() -> list[str]:
    texts = [text for healthy in HEALTHY.values() for text in (healthy.words, healthy.outside, healthy.advice, healthy.source)]
    sources = [Path(module.__file__).read_text() for module in (health, learning, service, verdict)]
    literals = (literal for source in sources for literal in re.findall(r'"([^"\n]*)"', source))
    return [*texts, *(re.sub(r"\{[^}]*\}", "", literal) for literal in literals)]


def test_settings_and_metrics_that_are_named_exist() -> None:
    known = {key for key, _ in config_keys.all_settings()}
    sections = "|".join({key.split(".")[0] for key in known})
    for text in every_text():
        for key in re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_]+)", text):
            assert key in known, f"{key} in: {text}"
        for name in re.findall(
            r"(?<![\w./])((?:reward|token_reward|advantage|ratio|policy|completion|train|seconds)/[a-z]\w+)", text
        ):
            assert name in NAMES, f"{name} in: {text}"


def test_the_catalogue_is_complete_where_something_is_said() -> None:
    assert HEALTHY.keys() <= NAMES
    for metric in METRICS:
        if (found := metric.healthy) is not None:
            assert found is HEALTHY[metric.name]
            assert found.expected, metric.name
            assert all(text.endswith(".") for text in (found.outside, found.advice)), metric.name
            assert found.low is None or found.high is None or found.low < found.high
    undescribed = {"step", "policy_version", "train/learning_rate", "train/updates", "tokens/rollout", "tokens/total"}
    assert undescribed <= NAMES - HEALTHY.keys()


def test_every_range_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    table = page.split("## What is healthy")[1].replace("`", "")
    for name, found in HEALTHY.items():
        assert f"| {name} | {found.expected} | {found.outside} | {found.advice} | {found.source} |" in table


def test_cases_are_told_apart() -> None:
    text = "Rising: lower a.b, or c. Not falling: raise it. Null: e.g. nothing."
    assert of_case(text, "Rising") == "Lower a.b, or c."
    assert of_case(text, "Not falling") == "Raise it."
    assert of_case(text, "Null") == "E.g. nothing."
    assert of_case(text, "") == text
    with pytest.raises(KeyError, match="Falling"):
        of_case(text, "Falling")


def test_every_check_says_something_of_a_healthy_run_or_of_a_failure() -> None:
    """No check is dead: each of the table gives a verdict in one of the runs of this file."""
    silent = {check.__name__ for check in health.CHECKS}
    runs: list[tuple[StoredRun, Sequence[StoredStep]]] = [(a_run(), [a_step()])]
    runs += [(a_run(with_series(**changed)), ()) for changed, _ in FAILURES]
    warned = {"name": "grades of the student", "ok": True, "warning": True, "detail": "Nothing is graded right."}
    runs += [(dataclasses.replace(a_run(), checks=(Check.model_validate(warned),)), ())]
    runs += [(a_run(evaluations=[scored("student", 12, 0.0, without_answer_rate=0.9)]), ())]
    runs += [(a_run(evaluations=[scored("student", step, 0.5) for step in (0, 6, 12)]), ())]
    runs += [(a_run([{**row, "train/loss": 1.0} for row in without("policy/entropy", "ratio/p50")]), ())]
    for run, steps in runs:
        for check in health.CHECKS:
            spoken: Callable[..., Any] = check
            if list(spoken(verdict.Watched(run=run, rollouts=steps))):
                silent.discard(check.__name__)
    assert silent == set()
