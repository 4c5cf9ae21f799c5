"""The token lens: what it holds of a run, and that every number in it is one of the files'."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.report.folders import TOPD, VECTOR, update, write_credit, write_run, write_step, write_updates
from topd.report.credit import NUM_EXTREMES, extremes, floor_of
from topd.report.lens import hold
from topd.report.stored import read_run
from topd.report.stored_step import StoredGroup, StoredRollout, StoredStep

COLUMNS = {
    "behaviour_logprob": "behaviour_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "token_reward": "token_rewards",
    "return": "returns",
    "advantage": "advantages",
}
INF, NAN = math.inf, math.nan
Payload = dict[str, Any]


def completion(rng: np.random.Generator, length: int) -> dict[str, Any]:
    names = ("student", "teacher", "token_reward", "return", "advantage")
    streams = {name: rng.normal(size=length).astype(np.float32).tolist() for name in names}
    return {"ids": rng.integers(0, 50, length).tolist(), "grade": float(rng.integers(0, 2)), **streams}


def long_run(path: Path, *, steps: int = 5, groups: int = 6, size: int = 3, length: int = 20, seed: int = 0) -> Path:
    """Every step has `groups` * `size` completions of `length` tokens."""
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        of_step = {f"p{step}-{i}": [completion(rng, length) for _ in range(size)] for i in range(groups)}
        if step == 1:
            write_run(path, of_step, words={i: b"w%d" % i for i in range(50)})
        else:
            write_step(path, of_step, step=step)
    return path


def rows_of(path: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(path / f"rollouts/step_{step:06d}.parquet").to_pylist()


def held(step: Payload) -> int:
    return sum(len(rollout["ids"]) for group in step["groups"] for rollout in group["rollouts"])


def num_held(run: Payload) -> int:
    return sum(map(held, run["steps"]))


def lens(path: Path, **options: Any) -> Payload:
    return hold([read_run(path)], **options)[0].data


def six(value: float) -> float | str | None:
    """By way of text with six digits."""
    return None if math.isnan(value) else repr(value) if math.isinf(value) else float(format(value, ".5e"))


def made(values: Sequence[Sequence[Sequence[float] | None]], stream: str = "log_ratio") -> StoredStep:
    """Groups of completions with one stream."""
    return StoredStep(
        step=1,
        groups=tuple(
            StoredGroup(
                index=i,
                prompt_id=str(i),
                domain="d",
                prompt="",
                answer=None,
                policy_version=0,
                rollouts=tuple(stored_rollout(j, of_rollout, stream) for j, of_rollout in enumerate(of_group)),
            )
            for i, of_group in enumerate(values)
        ),
    )


def stored_rollout(index: int, values: Sequence[float] | None, stream: str) -> StoredRollout:
    return StoredRollout(
        index=index,
        text="",
        token_ids=tuple(range(100, 100 + len(values or ()))),
        finish_reason="stop",
        grade=0.0,
        streams={} if values is None else {stream: np.array(values, dtype=np.float32)},
    )


def brute(path_or_step: StoredStep, stream: str, lowest: bool, count: int) -> list[tuple[int, int, int, float]]:
    """All tokens sorted; of equals the earlier one."""
    found = [
        (float(value) if lowest else -float(value), group.index, rollout.index, token)
        for group in path_or_step.groups
        for rollout in group.rollouts
        for token, value in enumerate(rollout.streams.get(stream, ()))
        if not math.isnan(value)
    ]
    return [(group, rollout, token, value if lowest else -value) for value, group, rollout, token in sorted(found)[:count]]


values = st.sampled_from([0.0, 1.0, -1.0, 2.5, -2.5, INF, -INF, NAN]) | st.floats(-9, 9, width=32)
steps_of_values = st.lists(st.lists(st.none() | st.lists(values, max_size=15), min_size=1, max_size=3), max_size=4)


@given(steps_of_values, st.booleans(), st.integers(1, 12))
def test_extremes_are_those_of_all_tokens_sorted(numbers: Any, lowest: bool, count: int) -> None:
    step = made(numbers)
    found = extremes(step, "log_ratio", lowest=lowest, count=count)
    assert [(e.group, e.rollout, e.token, e.value) for e in found] == brute(step, "log_ratio", lowest, count)
    assert all(e.token_id == 100 + e.token for e in found)


def test_of_equal_tokens_the_earlier_come_first() -> None:
    step = made([[[0.0] * 40, [-1.0] * 5 + [0.0] * 40], [[-1.0] * 40]])
    found = extremes(step, "log_ratio", lowest=True, count=8)
    assert [(e.group, e.rollout, e.token) for e in found] == [(0, 1, token) for token in range(5)] + [(1, 0, i) for i in range(3)]


def test_tokens_without_the_stream_are_no_extremes() -> None:
    assert extremes(made([[[1.0]]], "advantage"), "log_ratio", lowest=True) == []
    assert extremes(made([[[NAN, NAN]]]), "log_ratio", lowest=False) == []


@pytest.mark.parametrize("max_tokens", [700, 1000, 1800, 10_000])
def test_a_page_keeps_to_its_budget(tmp_path: Path, max_tokens: int) -> None:
    path = long_run(tmp_path / "run", steps=9)
    found = lens(path, max_tokens=max_tokens)
    assert 0.3 * min(max_tokens, 9 * 360) < num_held(found) <= max_tokens
    assert [found["steps"][0]["step"], found["steps"][-1]["step"]] == [1, 9]
    for step in found["steps"]:
        assert len(step["groups"]) >= 2
        assert [group["index"] for group in step["groups"]] == sorted({group["index"] for group in step["groups"]})
        assert step["num_groups"] == 6


def test_a_page_without_limit_holds_everything(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run")
    found = lens(path, max_tokens=10**9)
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    assert found["num_steps"] == 5
    assert num_held(found) == 5 * 360


def test_the_steps_are_evenly_spread(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=21, length=5)
    numbers = [step["step"] for step in lens(path, max_tokens=300)["steps"]]
    assert numbers == [1, 6, 11, 16, 21]


def test_completions_are_cut_if_the_fewest_groups_are_too_many(tmp_path: Path) -> None:
    """2 steps of 4 groups of 3 completions: 2 400 tokens are 100 of each."""
    path = long_run(tmp_path / "run", steps=2, length=500)
    found = lens(path, max_tokens=2400)
    rollouts = [rollout for step in found["steps"] for group in step["groups"] for rollout in group["rollouts"]]
    assert len(rollouts) == 24
    for rollout in rollouts:
        assert rollout["num_tokens"] == 500
        assert len(rollout["ids"]) == 100
        assert {len(rollout[name]) for name in (*COLUMNS, "log_ratio")} == {100}
    listed = [extreme for step in found["steps"] for extreme in (*step["worst"], *step["credited"])]
    assert {extreme["in_page"] for extreme in listed if extreme["token"] >= 100} == {False}


def test_however_small_the_budget_something_of_each_completion_is_there(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=2, length=100)
    lengths = {
        len(rollout["ids"]) for step in lens(path, max_tokens=1)["steps"] for g in step["groups"] for rollout in g["rollouts"]
    }
    assert lengths == {64}


def test_mean_token_rewards_are_over_the_whole_completion(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=1, groups=1, length=300)
    [group] = lens(path, max_tokens=300)["steps"][0]["groups"]
    for rollout, row in zip(group["rollouts"], rows_of(path, 1), strict=True):
        assert len(rollout["ids"]) == 100
        assert rollout["mean_token_reward"] == pytest.approx(math.fsum(row["token_rewards"]) / 300, rel=1e-5)


def test_the_groups_with_the_worst_and_the_most_credited_token_are_there(tmp_path: Path) -> None:
    for seed in range(4):
        path = long_run(tmp_path / f"run{seed}", steps=3, groups=12, seed=seed)
        for step in lens(path, max_tokens=3 * 2 * 60)["steps"]:
            rows = rows_of(path, step["step"])
            worst = min(
                rows, key=lambda row: min(t - s for s, t in zip(row["behaviour_logprobs"], row["teacher_logprobs"], strict=True))
            )
            credited = max(rows, key=lambda row: max(row["advantages"]))
            ids = {group["prompt_id"] for group in step["groups"]}
            assert {worst["prompt_id"], credited["prompt_id"]} <= ids
            assert len(ids) == 4


def test_what_is_held_is_flagged(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=2, groups=12)
    for step in lens(path, max_tokens=2 * 3 * 60)["steps"]:
        indices = {group["index"] for group in step["groups"]}
        listed = [*step["worst"], *step["credited"]]
        assert [extreme["in_page"] for extreme in listed] == [extreme["group"] in indices for extreme in listed]
        assert {extreme["in_page"] for extreme in listed} == {True, False}
        assert (len(step["worst"]), len(step["credited"])) == (NUM_EXTREMES, NUM_EXTREMES)


def test_every_number_is_the_files_to_six_digits(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=2)
    for step in lens(path)["steps"]:
        rows = {}
        for row in rows_of(path, step["step"]):
            rows.setdefault(row["prompt_id"], []).append(row)
        assert list(rows) == [group["prompt_id"] for group in step["groups"]]
        for group in step["groups"]:
            for rollout, row in zip(group["rollouts"], rows[group["prompt_id"]], strict=True):
                assert rollout["ids"] == row["completion_ids"]
                assert (rollout["grade"], rollout["finish_reason"]) == (row["grade"], "stop")
                for name, column in COLUMNS.items():
                    assert rollout[name] == [six(value) for value in row[column]]
                ratio = np.float32(row["teacher_logprobs"]) - np.float32(row["behaviour_logprobs"])
                assert rollout["log_ratio"] == [six(value) for value in ratio.tolist()]
                assert rollout["update"] is rollout["importance_ratio"] is rollout["clipped"] is None


def test_the_lists_name_the_tokens_of_the_files(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=1)
    [step] = lens(path, max_tokens=1)["steps"]
    rows = rows_of(path, 1)
    every = [
        (a, i // 3, i % 3, at, row["completion_ids"][at]) for i, row in enumerate(rows) for at, a in enumerate(row["advantages"])
    ]
    expected = sorted(every, key=lambda found: -found[0])[:NUM_EXTREMES]
    assert [(e["value"], e["group"], e["rollout"], e["token"], e["shown"]) for e in step["credited"]] == [
        (six(value), group, rollout, token, f"w{token_id}") for value, group, rollout, token, token_id in expected
    ]


def test_infinities_are_words_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    odd = {
        "ids": [0, 1, 2, 3],
        "student": [-1.0] * 4,
        "teacher": [-INF, NAN, -2.0, -1e-9],
        "token_reward": [INF, -INF, 1.0, 2.0],
        "advantage": [NAN] * 4,
    }
    found = lens(write_run(tmp_path / "run", {"a": [odd]}))
    [rollout] = found["steps"][0]["groups"][0]["rollouts"]
    assert rollout["log_ratio"] == ["-inf", None, -1.0, 1.0]
    assert rollout["token_reward"] == ["inf", "-inf", 1.0, 2.0]
    assert rollout["mean_token_reward"] is None
    assert [extreme["value"] for extreme in found["steps"][0]["worst"]] == ["-inf", -1.0, 1.0]
    assert found["steps"][0]["credited"] == []
    assert "advantage" not in found["scale"]
    json.dumps(found, allow_nan=False)


def test_without_a_teacher_its_streams_are_null(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": [{"ids": [1], "student": [-1.0], "advantage": [2.0]}]}, algorithm={"type": "grpo"})
    found = lens(path)
    [rollout] = found["steps"][0]["groups"][0]["rollouts"]
    assert rollout["teacher_logprob"] is rollout["log_ratio"] is None
    assert rollout["advantage"] == [2.0]
    assert found["steps"][0]["worst"] == []
    assert (found["floor"], found["floor_words"]) == (None, None)


def test_what_the_last_update_saw(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": [{"ids": [1, 2], "student": [-1.0] * 2}]})
    write_updates(path, update(7, [0.5, 1.25], [True, False]))
    [rollout] = lens(path)["steps"][0]["groups"][0]["rollouts"]
    assert (rollout["update"], rollout["importance_ratio"], rollout["clipped"]) == (7, [0.5, 1.25], [1, 0])


def test_tokens_are_in_the_vocabulary_once_and_by_their_neighbours_where_they_differ(tmp_path: Path) -> None:
    words = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b" \n"}
    path = write_run(tmp_path / "run", {"a": [{"ids": [0, 1, 2, 3, 9], "student": [-1.0] * 5}]}, words=words)
    found = lens(path)
    [rollout] = found["steps"][0]["groups"][0]["rollouts"]
    assert found["vocabulary"] == {
        **{"0": "a", "1": [("m", "C3")], "2": [("m", "A9")], "3": [("s", " "), ("n", "\n")], "9": "<9>"},
    }
    assert rollout["shown"] == {"2": "é"}
    assert found["special"] == [9]


def test_only_the_tokens_in_use_are_in_the_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": [{"ids": [3], "student": [-1.0]}]}, words=dict.fromkeys(range(100), b"x"))
    assert lens(path)["vocabulary"].keys() == {"3"}


def test_what_a_prompt_says_is_spelled_out(tmp_path: Path) -> None:
    text = "\u202e<b>\n"
    one = {"ids": [1], "student": [-1.0]}
    path = write_run(tmp_path / "run", {text: [one]}, prompt=text, answer=text, domain=text)
    [group] = lens(path)["steps"][0]["groups"]
    encoded = [("m", "U+202E"), ("t", "<b>"), ("n", "\n")]
    assert (group["prompt"], group["answer"]) == (encoded, encoded)
    assert (group["prompt_id"], group["domain"]) == ("<U+202E><b>\u23ce",) * 2
    write_step(path, {"a": [one]}, answer=None)
    assert lens(path)["steps"][0]["groups"][0]["answer"] is None


def test_the_same_folder_gives_the_same_data(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=4, groups=12)
    first, second = (json.dumps(lens(path, max_tokens=900)) for _ in range(2))
    assert first == second


def test_several_runs_share_the_budget(tmp_path: Path) -> None:
    paths = [long_run(tmp_path / name, steps=4, seed=seed) for seed, name in enumerate("abc")]
    found = [held.data for held in hold([read_run(path) for path in paths], max_tokens=1500)]
    assert [run["name"] for run in found] == ["a", "b", "c"]
    assert all(100 < num_held(run) <= 500 for run in found)
    for run, path in zip(found, paths, strict=True):
        assert run["steps"] == lens(path, max_tokens=500)["steps"]


def test_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=5)
    assert [step["step"] for step in lens(path, steps=[4, 2, 99])["steps"]] == [2, 4]
    assert lens(path, steps=[99])["steps"] == []
    assert num_held(lens(path, steps=[3], max_tokens=300)) <= 300


def test_steps_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=3)
    for step in (1, 3):
        (path / f"rollouts/step_{step:06d}.parquet").write_text("")
    run = read_run(path)
    found = hold([run])[0].data
    assert [step["step"] for step in found["steps"]] == [2]
    assert len(run.problems) == 2


def test_a_run_without_rollouts(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    run = read_run(tmp_path)
    found = hold([run])[0].data
    assert run.problems == []
    assert (found["steps"], found["vocabulary"], found["scale"], found["num_steps"]) == ([], {}, {}, 0)
    assert hold([]) == []


def test_every_step_that_was_read_is_handed_on_once(tmp_path: Path) -> None:
    [held] = hold([read_run(long_run(tmp_path / "run", steps=3))])
    assert [step.step for step in held.steps] == [1, 2, 3]


def test_units_are_those_of_the_runs_own_credit(tmp_path: Path) -> None:
    units = {
        "group": ({**TOPD}, ("nats", "nats", "nats", "group std")),
        "batch": ({**TOPD, "normalize": "batch_tokens"}, ("nats", "nats", "nats", "batch std")),
        "plain": ({**TOPD, "normalize": "none"}, ("nats", "nats", "nats", "nats")),
        "opd": ({"type": "opd", "clip": 0.2}, ("nats", "nats", "nats", "nats")),
    }
    for name, (algorithm, expected) in units.items():
        path = write_run(tmp_path / name, {"a": [{"ids": [1], "student": [-1.0], "teacher": [-2.0]}] * 2}, algorithm=algorithm)
        assert tuple(stream["unit"] for stream in lens(path)["streams"]) == expected, name
    graded = write_run(
        tmp_path / "grpo", {"a": [{"ids": [1], "student": [-1.0]}] * 2}, algorithm={"type": "grpo", "std_floor": 1e-6}
    )
    assert tuple(stream["unit"] for stream in lens(graded)["streams"])[1:] == ("grade", "grade", "group std")


def test_no_token_is_called_most_credited_where_all_of_a_completion_have_the_same(tmp_path: Path) -> None:
    completions = [{"ids": [1, 2], "student": [-1.0, -1.0], "advantage": [sign, sign]} for sign in (1.0, -1.0)]
    path = write_run(tmp_path / "run", {"a": completions}, algorithm={"type": "grpo", "std_floor": 1e-6})
    assert lens(path)["steps"][0]["credited"] == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"alpha": 0.2, "reward": "proximal"}, math.log(0.8)),
        ({"alpha": 0.5, "reward": "proximal"}, math.log(0.5)),
        ({"alpha": 1.0, "reward": "proximal"}, None),
        ({"alpha": 0.0, "reward": "proximal"}, None),
        ({"alpha": "x", "reward": "proximal"}, None),
        ({"reward": "clipped", "reward_bound": 5.0, "alpha": 0.2}, -5.0),
        ({"reward": "floor", "reward_bound": 2}, -2.0),
        ({"reward": "floor"}, -5.0),
        ({"reward": "power", "reward_power": 0.5}, -1.0),
        ({"reward": "log_ratio", "alpha": 0.2}, None),
        ({}, math.log(0.8)),
    ],
    ids=str,
)
def test_the_floor_of_every_reward(tmp_path: Path, settings: dict[str, Any], expected: float | None) -> None:
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"algorithm": {"type": "topd", **settings}}))
    write_credit(tmp_path, {"type": "topd", **settings})
    found = floor_of(read_run(tmp_path))
    assert (found and found[0]) == (expected and pytest.approx(expected, abs=1e-12))
    for key in ("alpha", "reward_bound") if found else ():
        assert key not in settings or f"{settings[key]:g}" in found[1] or settings["reward"] == "clipped"


def test_an_older_folder_has_no_floor_and_no_units(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": VECTOR})
    (path / "credit.json").unlink()
    found = lens(path)
    assert found["floor"] is None
    assert [stream["unit"] for stream in found["streams"]] == ["nats", "", "", ""]


@pytest.mark.parametrize("config", ["", 'algorithm = "topd"', "[algorithm]\ntype = 'grpo'", "algorithm = 3"])
def test_without_a_reward_there_is_no_floor(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    assert floor_of(read_run(tmp_path)) is None


def test_colours_are_scaled_by_the_99th_percentile_of_what_is_held(tmp_path: Path) -> None:
    path = long_run(tmp_path / "run", steps=2)
    scale = lens(path)["scale"]
    rows = [row for step in (1, 2) for row in rows_of(path, step)]
    for name in ("return", "advantage"):
        values = np.abs(np.concatenate([row[COLUMNS[name]] for row in rows]))
        assert scale[name] == pytest.approx(np.percentile(values, 99), rel=5e-3)
        assert values.mean() < scale[name] < values.max()
    assert scale.keys() == {"log_ratio", "token_reward", "return", "advantage"}


def test_the_scale_of_the_reward_holds_its_floor_and_none_is_zero(tmp_path: Path) -> None:
    one = {"ids": [1], "student": [-1.0], "teacher": [-INF], "token_reward": [-0.01]}
    assert lens(write_run(tmp_path / "run", {"a": [one]}))["scale"] == {
        "token_reward": 0.224,
        "return": 1e-6,
        "advantage": 1e-6,
    }
    assert (
        lens(write_run(tmp_path / "other", {"a": [one]}, algorithm={**TOPD, "reward": "log_ratio"}))["scale"]["token_reward"]
        == 0.01
    )


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_any_size_keep_to_the_budget(tmp_path: Path, seed: int) -> None:
    """Per step: the budget, or the least that is shown of the four groups that are always there."""
    rng = np.random.default_rng(seed)
    for step in (1, 2, 3):
        of_step = {
            f"p{i}": [completion(rng, int(rng.integers(1, 400))) for _ in range(rng.integers(1, 4))]
            for i in range(rng.integers(1, 9))
        }
        write_run(tmp_path, of_step) if step == 1 else write_step(tmp_path, of_step, step=step)
    max_tokens = int(rng.integers(500, 4000))
    found = lens(tmp_path, max_tokens=max_tokens)
    for step in found["steps"]:
        least = 64 * sum(len(group["rollouts"]) for group in step["groups"])
        assert held(step) <= max(max_tokens // len(found["steps"]), least)
        if len(step["groups"]) > 4:
            whole = [len(rollout["ids"]) == rollout["num_tokens"] for group in step["groups"] for rollout in group["rollouts"]]
            assert all(whole)
