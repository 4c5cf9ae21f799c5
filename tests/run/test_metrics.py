"""Metrics on hand-computed steps; the table is complete and its documentation current."""

import dataclasses
import math

import pytest
import torch

from tests.fakes import evidence
from topd.run.catalogue import METRICS, NAMES, VOLATILE
from topd.run.metrics import step_metrics
from topd.trainer.batch import flatten
from topd.types import Credit, Prompt, Rollout, RolloutGroup, ScoredGroup, UpdateReport

SECONDS = {"rollout": 2.0, "teacher": 1.0, "update": 0.5, "step": 4.0}


def group(name: str, *, grades: list[float], sampled: list[list[float]], taught: list[list[float]], cut: int = 0) -> ScoredGroup:
    streams = tuple(torch.tensor(values) for values in sampled)
    rollouts = tuple(
        Rollout(token_ids=(3,) * len(s), logprobs=s, finish_reason="length" if i < cut else "stop", text="")
        for i, s in enumerate(streams)
    )
    return ScoredGroup(
        group=RolloutGroup(prompt=Prompt(id=name, text="", token_ids=(1,)), rollouts=rollouts, policy_version=0),
        evidence=evidence(
            torch.tensor(grades),
            behaviour=streams,
            old=tuple(s + 0.01 for s in streams),
            teacher=tuple(torch.tensor(values) for values in taught),
        ),
        num_grader_errors=1,
    )


def report(
    loss: float, log_importance: list[float], clipped: list[bool], grad_norm: float = 0.0, learning_rate: float = 0.1
) -> UpdateReport:
    streams = {"log_importance": torch.tensor(log_importance), "clipped": torch.tensor(clipped)}
    return UpdateReport(loss=loss, grad_norm=grad_norm, learning_rate=learning_rate, **streams)


@pytest.fixture
def row() -> dict:
    groups = [
        group("a", grades=[1.0, 0.0], sampled=[[-1.0, -2.0], [-3.0]], taught=[[-1.0, -1.0], [-8.0]], cut=1),
        group("b", grades=[0.5, 0.5], sampled=[[-1.0], [-1.0]], taught=[[-1.0], [-1.0]]),
    ]
    flat = flatten(groups)
    rewards = torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0])
    credit = Credit(advantages=torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0]), token_rewards=rewards, returns=rewards)
    reports = [
        report(1.0, [0.0, 0.0, 0.0], [True, False, False], grad_norm=2.0, learning_rate=0.1),
        report(3.0, [math.log(2)] * 2, [False, True], grad_norm=4.0, learning_rate=0.2),
    ]
    return step_metrics(
        step=5,
        policy_version=10,
        groups=groups,
        flat=flat,
        credit=credit,
        reports=reports,
        seconds=SECONDS,
        tokens_before=100,
        sampled=True,
    )


def test_every_metric_has_its_hand_computed_value(row: dict) -> None:
    expected = {
        "step": 5,
        "policy_version": 10,
        "grade/mean": 0.5,  # (1 + 0 + .5 + .5) / 4
        "grade/std_in_group": math.sqrt(0.5) / 2,  # (sqrt(.5) + 0) / 2
        "grade/grader_errors": 2,
        "token_reward/mean": 0.0,
        "token_reward/floor_share": 0.2,  # the one token with log-ratio -5 of five
        "teacher/gap": 0.8,  # -(0 + 1 - 5 + 0 + 0) / 5
        "teacher/log_ratio_p50": 0.0,
        "teacher/log_ratio_p01": -5.0,
        "teacher/log_ratio_p99": 1.0,
        "token_reward/std_in_group": 0.5,  # (1 + 0) / 2
        "advantage/degenerate_groups": 0.5,
        "ratio/p01": 1.0,
        "ratio/p50": 1.0,
        "ratio/p99": 2.0,
        "ratio/clip_share": 0.4,  # 2 of 5
        "policy/entropy": 1.6,  # (1 + 2 + 3 + 1 + 1) / 5
        "policy/mismatch_kl": math.expm1(0.01) - 0.01,
        "completion/mean_length": 1.25,
        "completion/max_length": 2,
        "completion/truncation_rate": 0.25,
        "train/loss": 2.0,
        "train/grad_norm": 3.0,
        "train/grad_norm_max": 4.0,
        "train/learning_rate": 0.2,
        "train/updates": 2,
        "tokens/rollout": 5,
        "tokens/total": 105,
        "tokens_per_second/rollout": 2.5,
        "tokens_per_second/update": 10.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)


SERVED = ("teacher/requests", "teacher/retries", "teacher/cached")


def test_a_full_step_fills_the_whole_table(row: dict) -> None:
    """Except what only a served teacher, or several teachers, have."""
    assert NAMES - row.keys() == {name for name in NAMES if name.startswith(("teacher/NAME/", *SERVED))}


def test_an_infinite_gap_becomes_null_not_invalid_json() -> None:
    groups = [group("a", grades=[1.0, 0.0], sampled=[[-1.0], [-1.0]], taught=[[-math.inf], [-1.0]])]
    credit = Credit(advantages=torch.zeros(2), token_rewards=torch.zeros(2), returns=torch.zeros(2))
    found = step_metrics(
        step=1,
        policy_version=1,
        groups=groups,
        flat=flatten(groups),
        credit=credit,
        reports=[report(0.0, [0.0, 0.0], [False, False])],
        seconds=SECONDS,
        tokens_before=0,
        sampled=True,
    )
    assert found["teacher/gap"] is None
    assert found["token_reward/floor_share"] == 0.5


def test_names_are_declared_once_with_unit_and_meaning() -> None:
    assert len(NAMES) == len(METRICS)
    assert all(metric.unit and metric.meaning.endswith(".") for metric in METRICS)


def of_domain(scored: ScoredGroup, domain: str) -> ScoredGroup:
    group = dataclasses.replace(scored.group, prompt=dataclasses.replace(scored.group.prompt, domain=domain))
    return dataclasses.replace(scored, group=group)


def test_every_teacher_has_its_own_gap_reward_and_counts() -> None:
    """Domain x belongs to teacher a, y and z to b, w to c. A prompt of y was dropped, and the only one of w."""
    groups = [
        of_domain(group("a", grades=[1.0, 0.0], sampled=[[-1.0, -2.0], [-3.0]], taught=[[-1.0, -1.0], [-8.0]]), "x"),
        of_domain(group("b", grades=[0.5, 0.5], sampled=[[-1.0], [-1.0]], taught=[[-2.0], [-1.0]]), "y"),
        of_domain(group("c", grades=[0.5, 0.5], sampled=[[-1.0], [-1.0]], taught=[[-1.0], [-4.0]]), "z"),
    ]
    lost = [Prompt(id=name, text="", token_ids=(1,), domain=domain) for name, domain in (("d", "y"), ("e", "w"))]
    rewards = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 0.0, 0.1])
    row = step_metrics(
        step=1,
        policy_version=4,
        groups=groups,
        flat=flatten(groups),
        credit=Credit(advantages=torch.ones(7), token_rewards=rewards, returns=rewards),
        reports=[report(0.0, [0.0] * 7, [False] * 7)],
        seconds=SECONDS,
        tokens_before=0,
        sampled=True,
        prompts=[*(scored.group.prompt for scored in groups), *lost],
        counts={"requests": 5, "retries": 1, "cached": 2},
        teacher_of={"x": "a", "y": "b", "z": "b", "w": "c"},
    )
    expected = {
        "teacher/a/gap": 4 / 3,  # (0 - 1 + 5) / 3
        "teacher/a/token_reward": 0.0,
        "teacher/a/groups": 1,
        "teacher/b/gap": 1.0,  # (1 + 0 + 0 + 3) / 4
        "teacher/b/token_reward": 0.15,
        "teacher/b/groups": 2,
        "teacher/dropped_groups": 2,
        "teacher/a/dropped_groups": 0,
        "teacher/b/dropped_groups": 1,
        "teacher/c/dropped_groups": 1,
        "teacher/requests": 5,
        "teacher/retries": 1,
        "teacher/cached": 2,
        "policy/lag": 3,  # version 4 after one update, sampled by version 0
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert "teacher/c/gap" not in row


def test_counts_of_servers_do_not_belong_to_the_result() -> None:
    """They depend on what failed on the way."""
    assert {"teacher/requests", "teacher/retries", "teacher/cached"} <= VOLATILE
    assert "teacher/dropped_groups" not in VOLATILE


def one_group_row(ratios: list[float], advantages: list[float] | None = None, **changes: object) -> dict:
    """The metrics of one completion whose tokens have these teacher/student ratios."""
    sampled = [-3.0] * len(ratios)
    scored = group("a", grades=[1.0], sampled=[sampled], taught=[[-3.0 + math.log(ratio) for ratio in ratios]])
    zeros = torch.zeros(len(ratios))
    credit = Credit(advantages=torch.tensor(advantages or [0.0] * len(ratios)), token_rewards=zeros, returns=zeros)
    seen = [report(0.0, [0.0] * len(ratios), [False] * len(ratios))]
    settings = {"step": 1, "policy_version": 1, "groups": [scored], "credit": credit, "reports": seen, "seconds": SECONDS}
    settings |= {"tokens_before": 0, "sampled": True, **changes}
    return step_metrics(flat=flatten(settings["groups"]), **settings)


def test_the_floor_is_a_tenth_of_the_students_probability() -> None:
    assert one_group_row([0.05, 0.09, 0.11, 0.15, 0.19])["token_reward/floor_share"] == pytest.approx(2 / 5)


def test_percentiles_are_of_nearest_rank() -> None:
    """Of 1 to 200 the 1st, 50th and 99th percentiles are 2, 100 and 198."""
    log_importance = torch.arange(1.0, 201.0).flip(0).log().tolist()
    row = one_group_row([1.0] * 200, reports=[report(0.0, log_importance, [False] * 200)])
    assert [row[f"ratio/p{p}"] for p in ("01", "50", "99")] == pytest.approx([2.0, 100.0, 198.0], rel=1e-5)


def test_a_group_is_degenerate_if_no_advantage_differs_from_zero() -> None:
    assert one_group_row([1.0, 1.0], [0.0, -1.0])["advantage/degenerate_groups"] == 0.0
    assert one_group_row([1.0, 1.0], [0.0, 0.0])["advantage/degenerate_groups"] == 1.0


def test_several_epochs_train_on_more_tokens_than_were_sampled() -> None:
    row = one_group_row([1.0] * 5, reports=[report(0.0, [0.0] * 5, [False] * 5) for _ in range(3)])
    assert row["tokens_per_second/update"] == 30.0  # 15 tokens in half a second
    assert row["tokens_per_second/rollout"] == 2.5


def test_where_sampled_log_probs_were_taken_over_the_mismatch_is_that_of_the_first_update() -> None:
    scored = group("a", grades=[1.0], sampled=[[-1.0, -2.0]], taught=[[-1.0, -2.0]])
    taken_over = dataclasses.replace(scored, evidence=scored.evidence.adding(old_logprobs=scored.evidence["behaviour_logprobs"]))
    reports = [report(0.0, [0.2, 0.2], [False] * 2), report(0.0, [0.9, 0.9], [False] * 2)]
    row = one_group_row([1.0, 1.0], groups=[taken_over], reports=reports)
    assert row["policy/mismatch_kl"] == pytest.approx(math.expm1(0.2) - 0.2, rel=1e-5)
