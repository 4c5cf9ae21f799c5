"""`topd grade` and `topd.grade`: the task's rule on a user's own completions."""

import io
import json
from pathlib import Path

import pytest

import topd
from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.cli import main
from topd.errors import ConfigError

BOXED = {"type": "jsonl", "path": "builtin:sums_train.jsonl"}


def written(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(tmp_path / "rows.jsonl")


def config(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "config.toml"
    path.write_text(config_file.dump(config_file.load(tiny_config(tmp_path / "run", task=BOXED, **changes))), encoding="utf-8")
    return str(path)


def test_every_line_gets_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = written(
        tmp_path,
        r'{"answer": 0.00001, "completion": "so \\boxed{10^{-5}}"}',
        r'{"answer": "20", "completion": "\\boxed{18}, no, \\boxed{"}',
        "",
        r'{"answer": null, "completion": "\\boxed{18}"}',
        r'{"answer": "7", "completion": "\\boxed{(10^{8})!}"}',
        r'{"answer": "3 + 2 = 5\n#### 5", "completion": "#### 5"}',
        r'{"reward_model": {"ground_truth": "5"}, "completion": "\\boxed{5}"}',
        r'{"solution": "so \\boxed{5}", "completion": "\\boxed{5}"}',
        r'{"answer": "5", "completion": "6"}',
    )
    assert main(["grade", config(tmp_path), rows]) == 0
    graded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert graded[:3] == [
        {"extracted": "10^{-5}", "grade": 1.0, "error": None},
        {"extracted": None, "grade": 0.0, "error": None},
        {"extracted": "18", "grade": 0.0, "error": "there is no answer to grade against"},
    ]
    assert (graded[3]["extracted"], graded[3]["grade"]) == ("(10^{8})!", 0.0)
    assert graded[3]["error"]
    assert [row["grade"] for row in graded[4:]] == [1.0, 1.0, 1.0, 0.0]


def test_standard_input_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"answer": "5", "completion": "Answer: 5"}\n'))
    assert main(["grade", config(tmp_path), "-"]) == 0
    assert json.loads(capsys.readouterr().out)["grade"] == 1.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 1: not JSON"),
        ("[1]", "found list, every line must be one JSON object"),
        ('{"answer": "1"}', 'row 1: needs "completion"'),
        ('{"anwser": "1", "completion": "1"}', "row 1: needs \"answer\", as in training data; found 'anwser'"),
        ('{"answer": "1", "answer": "2", "completion": "1"}', "a field is given twice"),
        ('{"answer": NaN, "completion": "1"}', "NaN is not a JSON number"),
        (r'{"answer": "1", "completion": "1\ud83d"}', "line 1: not JSON"),
        ('{"answer": true, "completion": "1"}', "must be a string or a number, found bool"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", config(tmp_path), written(tmp_path, line)]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", config(tmp_path), str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl' cannot be read" in capsys.readouterr().err


def test_a_generators_own_scorer_grades_the_boxed_answer(tmp_path: Path) -> None:
    task = {"type": "reasoning_gym", "generator": "chain_sum", "train_size": 2, "eval_size": 2}
    settings = tiny_config(tmp_path, task=task)
    rows = [{"answer": "12", "completion": r"5+7 is \boxed{12}"}, {"answer": "12", "completion": r"5+7 is \boxed{13}"}]
    assert [row["grade"] for row in topd.grade(settings, rows)] == [1.0, 0.0]


def test_an_item_is_known_by_its_question(tmp_path: Path) -> None:
    """Of a puzzle with several solutions only the generator's own item tells which are right."""
    from topd.tasks.task import make_task

    task = {"type": "reasoning_gym", "generator": "countdown", "train_size": 1, "eval_size": 1}
    settings = tiny_config(tmp_path, task=task)
    [problem] = make_task(config_file.load(settings).task, seed=0).train
    row = {"completion": rf"\boxed{{{problem.answer}}}", "answer": problem.answer}
    rows = [row | {"question": problem.question}, row | {"question": problem.question, "answer": None}, row]
    known, also_known, unknown = topd.grade(settings, rows)
    assert known["grade"] == also_known["grade"] == 1.0
    assert unknown["grade"] < 1.0


def test_python_rows_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 2"):
        topd.grade(tiny_config(tmp_path), [{"answer": 1, "completion": "1"}, {"answer": 1}])
