"""avg@k, pass@k and their intervals, on hand-made grades and on a real engine."""

import json
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
    own = {"eval__max_problems": 3, "eval__samples_per_problem": 4, "eval__top_p": 0.9, "student__dtype": "bfloat16"}
    config = tiny_config(tmp_path, **own)
    first, second = evaluate("builtin:tiny-teacher", config), evaluate("builtin:tiny-teacher", config)
    assert first == second
    [row] = first
    assert (row["benchmark"], row["k"], row["problems"]) == ("held_out", 4, 3)
    assert (row["temperature"], row["top_p"], row["max_completion_tokens"], row["dtype"]) == (1.0, 0.9, 24, "bfloat16")
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


def held_out(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def teacher_row(tmp_path: Path, **changes: object) -> dict:
    [row] = evaluate("builtin:tiny-teacher", tiny_config(tmp_path / "run", eval__max_problems=None, **changes))
    return row


EASY = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 5)]
LONG = {"prompt": "1+2+3+4+5=", "answer": "15"}


def test_held_out_prompts_that_are_too_long_count_as_wrong(tmp_path: Path) -> None:
    path = held_out(tmp_path, *EASY, LONG)
    whole = teacher_row(tmp_path, task__eval_path=path)
    cut = teacher_row(tmp_path, task__eval_path=path, task__max_prompt_tokens=6)
    assert (whole["problems"], whole["too_long"]) == (5, 0)
    assert (cut["problems"], cut["too_long"]) == (5, 1)
    easy = teacher_row(tmp_path, task__eval_path=held_out(tmp_path, *EASY))
    assert cut["avg_at_k"] == pytest.approx(easy["avg_at_k"] * 4 / 5)
    assert cut["task"]["max_prompt_tokens"] == 6


def test_what_is_left_out_stands_in_the_row(tmp_path: Path) -> None:
    blank = [{"prompt": "5+5=", "answer": answer} for answer in (None, "", "  ")]
    rows = [*EASY, {"prompt": "2+1= ", "answer": "3"}, *blank, {"prompt": "6+6="}]
    row = teacher_row(tmp_path, task__eval_path=held_out(tmp_path, *rows))
    assert row["problems"] == 4
    assert row["left_out"] == {"duplicates": 1, "without_answer": 4, "max_problems": 0}
    row = teacher_row(tmp_path, task__eval_path=held_out(tmp_path, *rows), eval__seed=3)
    assert row["seed"] == 3


def test_the_base_model_gets_the_same_number_in_runs_of_all_seeds(tmp_path: Path) -> None:
    rows = [teacher_row(tmp_path, eval__samples_per_problem=1, eval__temperature=1.5, run__seed=seed) for seed in (0, 1)]
    assert rows[0] == rows[1]
    other = teacher_row(tmp_path, eval__samples_per_problem=1, eval__temperature=1.5, eval__seed=1)
    assert other["mean_length"] != rows[0]["mean_length"]


def test_every_setting_that_changes_a_number_stands_in_its_row(tmp_path: Path) -> None:
    row = teacher_row(tmp_path, task__prompt_suffix="", task__eval_path=held_out(tmp_path, *EASY))
    other = teacher_row(tmp_path, task__prompt_suffix="1+", task__eval_path=held_out(tmp_path, *EASY[:3]))
    assert (row["task"]["grader"], row["task"]["answer_pattern"]) == ("exact", "([^;]+)$")
    assert other["task"]["prompt_suffix"] == "1+"
    assert row["problems_sha256"] != other["problems_sha256"]


def test_a_changed_benchmark_is_refused_on_resume(tmp_path: Path) -> None:
    import topd

    def run(**changes: object) -> None:
        topd.train(tiny_config(tmp_path / "run", run__steps=1, task__eval_path=str(tmp_path / "held_out.jsonl"), **changes))

    held_out(tmp_path, *EASY)
    run()
    held_out(tmp_path, *EASY[:3])
    with pytest.raises(ConfigError, match="held-out problems are not those"):
        run(run__resume=True)


def test_what_is_left_out_is_said_with_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import topd

    path = held_out(
        tmp_path, *EASY, LONG, {"prompt": "6+6="}, {"prompt": "1+1=", "answer": "2"}, {"prompt": "9+9=", "answer": "18"}
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 2=", "answer": "3"}\n{"prompt": " 9+9=", "answer": "18"}\n')
    settings = {"task__path": str(tmp_path / "train.jsonl"), "rollout__prompts_per_step": 2, "eval__max_problems": None}
    settings |= {"teacher__dtype": "bfloat16", "algorithm__rounding": 1.0}
    config = tiny_config(tmp_path / "run", run__steps=1, task__eval_path=path, task__max_prompt_tokens=6, **settings)
    topd.train(config)
    rows = map(json.loads, (tmp_path / "run/evals.jsonl").read_text().splitlines())
    assert {(row["model"], row["dtype"]) for row in rows} == {("student", "float32"), ("teacher", "bfloat16")}
    shown = " ".join(capsys.readouterr().out.split())
    assert "held_out: 6 problems, 2 samples each (1 left out without an answer, 1 left out as duplicate, 1 too long" in shown
    assert "1 training problems are also held out: they are not trained on" in shown
