"""JSON lines are read strictly, and a bad line is named."""

import json
from pathlib import Path

import pytest

from topd.config import JsonlConfig
from topd.errors import ConfigError
from topd.tasks.load import load_task


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_all_fields_arrive(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": 2, "domain": "sums", "demonstration": "2"}
    path = write(tmp_path / "train.jsonl", row, "", {"prompt": "2+2="})
    task = load_task(JsonlConfig(type="jsonl", path=path), seed=0)
    first, second = task.train
    assert (first.question, first.answer, first.domain, first.demonstration) == ("1+1=", "2", "sums", "2")
    assert (second.answer, second.domain, second.demonstration) == (None, "default", None)
    assert task.held_out == []


def test_held_out_questions_leave_the_training_set(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "a"}, {"prompt": "b"})
    held_out = write(tmp_path / "eval.jsonl", {"prompt": "b"})
    task = load_task(JsonlConfig(type="jsonl", path=train, eval_path=held_out), seed=0)
    assert [problem.question for problem in task.train] == ["a"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: found list"),
        ('{"prompt": "x", "answer": NaN}', "NaN is no JSON number"),
        ('{"prompt": "\\ud800"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "x", "answer": ' + "1" * 5000 + "}", "not JSON"),
        ({"prompt": "x", "answer": True}, "`answer` must be a string or a number, found bool"),
        ({"prompt": "x", "anwser": "1"}, "unknown field 'anwser'"),
        ({"answer": "1"}, "`prompt` must be a non-empty string"),
        ({"prompt": ""}, "`prompt` must be a non-empty string"),
        ({"prompt": "x", "answer": ["1"]}, "`answer` must be a string or a number, found list"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: object, said: str) -> None:
    path = write(tmp_path / "train.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=r"task\.path.*line 2") as caught:
        load_task(JsonlConfig(type="jsonl", path=path), seed=0)
    assert said in str(caught.value)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path: there is no file"):
        load_task(JsonlConfig(type="jsonl", path=str(tmp_path / "none.jsonl")), seed=0)
    with pytest.raises(ConfigError, match="no training problems"):
        load_task(JsonlConfig(type="jsonl", path=write(tmp_path / "empty.jsonl")), seed=0)


def test_a_byte_order_mark_and_line_separators_inside_strings_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\n'.encode())
    [problem] = load_task(JsonlConfig(type="jsonl", path=str(path)), seed=0).train
    assert problem.question == "a\u2028b"
