"""avg@k, pass@k and their intervals, on hand-made grades and on a real engine."""

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.tiny import tiny_config
from topd import config_file, evaluate
from topd.errors import ConfigError
from topd.eval.benchmark import summarise


def test_hand_made_grades() -> None:
    scores = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    found = summarise(scores, seed=0)
    assert found["avg_at_k"] == pytest.approx((1 + 0.25 + 0) / 3)  # only full marks are right
    assert found["mean_score"] == pytest.approx((4 + 1 + 2) / 12)
    assert (found["k"], found["problems"]) == (4, 3)
    # pass@2 of one right in four: 1 - C(3,2)/C(4,2) = 1/2
    assert found["pass_at"]["2"]["value"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert set(found["pass_at"]) == {"1", "2", "4"}
    low, high = found["ci95"]
    assert 0 <= low <= found["avg_at_k"] <= high <= 1


def test_pass_at_one_is_avg_at_k() -> None:
    scores = (np.random.default_rng(0).random((20, 6)) < 0.4).astype(float)
    found = summarise(scores, seed=0)
    assert found["pass_at"]["1"]["value"] == pytest.approx(found["avg_at_k"])
    assert set(found["pass_at"]) == {"1", "2", "4", "6"}


def test_settings_are_stored_with_the_number_and_the_draw_is_repeatable(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, eval__max_problems=3, eval__samples_per_problem=4, eval__top_p=0.9)
    first, second = evaluate("builtin:tiny-teacher", config), evaluate("builtin:tiny-teacher", config)
    assert first == second
    [row] = first
    assert (row["benchmark"], row["k"], row["problems"]) == ("held_out", 4, 3)
    assert (row["temperature"], row["top_p"], row["max_completion_tokens"]) == (1.0, 0.9, 24)
    assert 0 <= row["truncation_rate"] <= 1


def test_several_benchmarks_stay_apart(tmp_path: Path) -> None:
    task = {"type": "jsonl", "path": "builtin:sums_train.jsonl", "eval_path": "builtin:sums_eval.jsonl", "grader": "exact"}
    benchmarks = [
        {"name": "with answers found", "task": {**task, "answer_pattern": "([^;]+)$"}},
        {"name": "whole text compared", "task": task},
    ]
    rows = evaluate("builtin:tiny-teacher", tiny_config(tmp_path, eval__benchmarks=benchmarks))
    assert [row["benchmark"] for row in rows] == ["with answers found", "whole text compared"]
    assert rows[0]["avg_at_k"] > rows[1]["avg_at_k"] == 0.0


def test_nothing_to_evaluate_is_an_error(tmp_path: Path) -> None:
    config = config_file.load(tiny_config(tmp_path, task__eval_path=None))
    with pytest.raises(ConfigError, match="no held-out problems"):
        evaluate("builtin:tiny-teacher", config)


def test_a_question_that_a_benchmark_asks_is_not_trained_on(tmp_path: Path) -> None:
    from topd.assemble import assemble

    task = {"type": "jsonl", "path": "builtin:sums_eval.jsonl", "eval_path": "builtin:sums_train.jsonl", "grader": "exact"}
    config = tiny_config(tmp_path, eval__benchmarks=[{"name": "other", "task": task}])
    with pytest.raises(ConfigError, match="every training problem is also held out"):
        assemble(config_file.load(config))
    assert assemble(config_file.load(tiny_config(tmp_path))).notices == []


def test_a_named_benchmark_without_problems_is_an_error(tmp_path: Path) -> None:
    from topd.assemble import assemble

    task = {"type": "jsonl", "path": "builtin:sums_train.jsonl", "grader": "exact"}
    with pytest.raises(ConfigError, match='"empty" has no held-out problems'):
        assemble(config_file.load(tiny_config(tmp_path, eval__benchmarks=[{"name": "empty", "task": task}])))
