"""JSON lines are read strictly and as written, whatever form they have, and a bad line is named."""

import json
from pathlib import Path

import pytest

from topd.errors import ConfigError
from topd.tasks.jsonl import Config as JsonlConfig
from topd.tasks.task import Message, Problem, Task, make_task

USER, GREETING = {"role": "user", "content": "1+1="}, {"role": "system", "content": "Add."}
ASSISTANT = {"role": "assistant", "content": "It is 2."}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(folder: Path, *rows: object, held_out: tuple[object, ...] = ()) -> Task:
    path = write(folder / "train.jsonl", *rows)
    eval_path = write(folder / "eval.jsonl", *held_out) if held_out else None
    return make_task(JsonlConfig(type="jsonl", path=path, eval_path=eval_path), seed=0)


def read(folder: Path, row: object) -> Problem:
    [problem] = load(folder, row).train
    return problem


def test_all_fields_arrive(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": 2, "domain": "sums", "demonstration": "2", "system_prompt": "Add."}
    task = load(tmp_path, row, "", {"prompt": "2+2="})
    first, second = task.train
    assert (first.question, first.answer, first.domain, first.demonstration) == ("1+1=", "2", "sums", "2")
    assert (first.system_prompt, first.messages) == ("Add.", ())
    assert (second.answer, second.domain, second.demonstration, second.system_prompt) == (None, "default", None, None)
    assert second.source == f"{tmp_path / 'train.jsonl'}, line 3"
    assert task.held_out == []


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        *[(number, number) for number in ("0.00001", "1e3", "1.10", "1e16", "-0", "1E-2", "12345678901234567890.5", "1" * 5000)],
        ('"1.10"', "1.10"),
        ('" 8 "', " 8 "),
        *[(nothing, None) for nothing in ("null", '""', '" \\n"')],
    ],
)
def test_answers_are_kept_as_written(tmp_path: Path, written: str, answer: str | None) -> None:
    assert read(tmp_path, f'{{"prompt": "x", "answer": {written}}}').answer == answer


def test_held_out_questions_leave_the_training_set_and_are_counted(tmp_path: Path) -> None:
    shots = [USER, ASSISTANT, {"role": "user", "content": "b"}]
    train = ["a", "b", " b", "b\t c", [{"role": "user", "content": "b\nc"}], shots, shots[:1], "1+1= It is 2. b"]
    held_out = [{"prompt": prompt, "answer": "1"} for prompt in ("b", "b c", [GREETING, *shots])]
    task = load(tmp_path, *({"prompt": prompt} for prompt in train), held_out=(*held_out, {"prompt": "a"}))
    assert [problem.question for problem in task.train] == ["1+1="]
    assert (task.num_leaks, task.num_duplicates, task.num_unanswered) == (7, 0, 1)


def test_held_out_problems_count_once_and_only_with_an_answer(tmp_path: Path) -> None:
    answers = [("a", "1"), ("a ", "1"), ("b", None), ("c", ""), ("d", " "), ("b", "2"), ("e", "3")]
    held_out = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
    held_out.append({"prompt": "e", "answer": "4", "system_prompt": "Add one."})
    task = load(tmp_path, {"prompt": "x"}, {"prompt": "x"}, held_out=tuple(held_out))
    assert [(p.question, p.answer) for p in task.held_out] == [("a", "1"), ("b", "2"), ("e", "3"), ("e", "4")]
    assert (task.num_leaks, task.num_duplicates, task.num_unanswered) == (0, 1, 3)
    assert len(task.train) == 2
    with pytest.raises(ConfigError, match=r"no held-out problem has an answer .*eval\.jsonl, line 1"):
        load(tmp_path, {"prompt": "x"}, held_out=tuple({"prompt": prompt, "answer": ""} for prompt in "ab"))


def test_one_number_written_in_two_ways_is_one_answer(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("1072", "1,072", "1072.0")]
    assert [problem.answer for problem in load(tmp_path, *rows).train] == ["1072", "1,072", "1072.0"]


@pytest.mark.parametrize("place", ["train", "eval"])
def test_a_question_with_two_answers_is_an_error_with_both_lines(tmp_path: Path, place: str) -> None:
    rows = [{"prompt": "a b", "answer": 1}, {"prompt": "a b"}, {"prompt": [{"role": "user", "content": "a  b\n"}], "answer": 1.5}]
    parts = {"train": ({"prompt": "x"},), "eval": ({"prompt": "x", "answer": "1"},), place: tuple(rows)}
    with pytest.raises(ConfigError, match=rf"{place}\.jsonl, line 1 and .*{place}\.jsonl, line 3 .* '1' and '1.5': 'a  b"):
        load(tmp_path, *parts["train"], held_out=parts["eval"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: found list"),
        ('{"prompt": "x", "answer": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "\\ud800"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "x", "answer": "1", "answer": "2"}', "a field is given twice among prompt, answer, answer"),
        ({"prompt": "x", "answer": True}, "`answer` must be a string or a number, found bool"),
        ({"prompt": "x", "answer": ["1"]}, "`answer` must be a string or a number, found list"),
        ({"prompt": "x", "reward_model": {"ground_truth": ["1"]}}, "`reward_model.ground_truth` must be a string or a number"),
        ({"prompt": "x", "reward_model": "1"}, "`reward_model` must hold `ground_truth`; found 1"),
        (
            {"prompt": "x", "answer": "1", "reward_model": {"ground_truth": "2"}},
            "`answer` is '1', `reward_model.ground_truth` is '2'",
        ),
        ({"prompt": "x", "anwser": "1"}, "unknown field 'anwser'. Did you mean `answer`?"),
        ({"prompt": "x", "idea": 7}, "unknown field 'idea'"),
        ({"instruction": "x", "output": "1", "aside": 1}, "unknown field 'instruction'. Rename it to `prompt`."),
        ({"conversations": [{"from": "human", "value": "x"}]}, "'conversations'. Rename it to `messages`"),
        ({"question": "x", "choices": ["1", "2"], "answer": 1}, "'choices'. Write the choices into the question"),
        ({"problem": "x", "expected_answer": "1"}, "'expected_answer'. Rename it to `answer`."),
        ({"prompt": "x", "chosen": "1", "rejected": "2"}, "'chosen'. Preferences are not read"),
        ({"prompt": [USER], "images": ["x.png"]}, "'images'. Only text is read."),
        ({"prompt": "x", "question": "x"}, "`prompt` and `question` say the same thing twice"),
        ({"prompt": "x", "completion": "1", "demonstration": "2"}, "`demonstration` and `completion` say the same thing twice"),
        ({"messages": [USER, ASSISTANT], "completion": "2"}, "`completion` and `messages` say the same thing twice"),
        ({"answer": "1"}, "`prompt` must be a non-empty string, or a list of messages, found nothing"),
        ({"prompt": '[{"role": "user", "content": "x"}]'}, "is a text that holds a list of messages"),
        ({"prompt": '[{"content": "x", "role": "user"}]'}, "is a text that holds a list of messages"),
        ({"prompt": ""}, "`prompt` must be a non-empty string"),
        ({"prompt": " \n"}, "`prompt` must be a non-empty string"),
        ({"prompt": 5}, "`prompt` must be a non-empty string"),
        ({"prompt": 5.5}, "`prompt` must be a non-empty string"),
        ({"prompt": []}, "`prompt` must be a non-empty string"),
        ({"prompt": ["x"]}, "`prompt`, message 1 must have `role` and `content`, and nothing else; found x"),
        ({"prompt": [{**USER, "tool_calls": [1]}]}, "message 1 must have `role` and `content`, and nothing else"),
        ({"prompt": [{"from": "human", "value": "x"}]}, "Rename them to `role` and `content`"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, "`role` must be system, user or assistant; found 'tool'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "`content` must be a string, or a list of text parts"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "link", "text": "x"}]}]},
            "`content` must be a string, or a list of text parts",
        ),
        ({"prompt": [{"role": "user", "content": 5}]}, "`content` must be a string, or a list of text parts"),
        ({"prompt": [USER, GREETING]}, "only the first message may be the system's"),
        ({"prompt": [USER, ASSISTANT]}, "`prompt` must end with a user's message that is not empty (name the field `messages`"),
        ({"messages": [GREETING, ASSISTANT]}, "`messages` must end with a user's message"),
        ({"prompt": [GREETING]}, "`prompt` must end with a user's message"),
        ({"prompt": [{"role": "user", "content": " "}]}, "`prompt` must end with a user's message"),
        ({"prompt": [GREETING, USER], "system_prompt": "x"}, "`system_prompt` is given beside a system message"),
        ({"prompt": "x", "system_prompt": ""}, "`system_prompt` is blank. Remove it"),
        ({"prompt": [USER], "completion": [USER, ASSISTANT]}, "`completion` must be one message of the assistant"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 2: ") as caught:
        load(tmp_path, {"prompt": "fine"}, row)
    assert said in str(caught.value)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path: there is no file"):
        make_task(JsonlConfig(type="jsonl", path=str(tmp_path / "none.jsonl")), seed=0)
    with pytest.raises(ConfigError, match=r"train\.jsonl holds no problem"):
        load(tmp_path)


def test_a_byte_order_mark_and_line_separators_inside_strings_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\n'.encode())
    [problem] = make_task(JsonlConfig(type="jsonl", path=str(path)), seed=0).train
    assert problem.question == "a\u2028b"


def test_one_user_message_asks_what_its_text_asks() -> None:
    assert Problem(question="b", messages=(Message(role="user", content=" b "),)).key == Problem(question="b").key
