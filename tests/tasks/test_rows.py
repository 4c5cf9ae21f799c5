"""Rows of other people's files become problems; tests/tasks/test_jsonl.py holds those that are refused."""

import pytest

from topd.tasks.rows import Number, problem_from

USER, GREETING = {"role": "user", "content": "1+1="}, {"role": "system", "content": "Add."}
ASSISTANT = {"role": "assistant", "content": "It is 2."}

WORKED = "He has <<2*36=72>>72 left.\n#### 1,072"
SOLUTION = r"So $x=\frac12$, that is \boxed{\frac{1}{2}}."


@pytest.mark.parametrize(
    ("row", "question", "answer", "demonstration"),
    [
        pytest.param({"question": "1+1=", "answer": WORKED}, "1+1=", "1072", WORKED, id="GSM8K"),
        pytest.param(
            {"question": "q", "answer": "#### 1,200,000.5 "}, "q", "1200000.5", "#### 1,200,000.5 ", id="GSM8K, thousands"
        ),
        pytest.param({"question": "q", "answer": "so\n#### (1,2)"}, "q", "(1,2)", "so\n#### (1,2)", id="GSM8K, a pair"),
        pytest.param({"question": "q", "answer": "1,000"}, "q", "1,000", None, id="a bare answer is as written"),
        pytest.param({"prompt": "q", "answer": WORKED, "demonstration": "72"}, "q", "1072", "72", id="GSM8K with our fields"),
        pytest.param(
            {"problem": "q", "solution": SOLUTION, "level": "Level 1", "type": "Algebra"},
            "q",
            r"\frac{1}{2}",
            SOLUTION,
            id="MATH",
        ),
        pytest.param(
            {"problem": "q", "solution": SOLUTION, "answer": "0.5", "unique_id": 1}, "q", "0.5", SOLUTION, id="MATH-500"
        ),
        pytest.param(
            {"problem": "q", "solution": r"\boxed{3} or \boxed{4"}, "q", None, r"\boxed{3} or \boxed{4", id="no last box"
        ),
        pytest.param(
            {
                "data_source": "math_dapo",
                "prompt": [USER],
                "ability": "MATH",
                "reward_model": {"ground_truth": "34", "style": "rule"},
                "extra_info": {"index": "a"},
            },
            "1+1=",
            "34",
            None,
            id="DAPO",
        ),
        pytest.param(
            {"prompt": "q", "solution": "34", "reward_model": {"ground_truth": "34"}, "source_prompt": [USER]},
            "q",
            "34",
            None,
            id="DAPO, processed",
        ),
        pytest.param({"prompt": "q", "answer": "1", "reward_model": {"ground_truth": ""}}, "q", "1", None, id="no ground truth"),
        pytest.param({"question": "q", "answer": "so #### 7"}, "q", "7", "so #### 7", id="a mark inside a line"),
        pytest.param({"question": "q", "answer": "so\n#### 7\nThanks"}, "q", "7", "so\n#### 7\nThanks", id="words after it"),
        pytest.param({"question": "q", "answer": "#### 6\n#### 7"}, "q", "7", "#### 6\n#### 7", id="two marks"),
        pytest.param({"question": "q", "solution": "so\n#### 5"}, "q", "5", "so\n#### 5", id="a worked solution"),
        pytest.param({"prompt": "q", "solution": r"$-\frac{2}{3}$"}, "q", r"$-\frac{2}{3}$", None, id="TRL, a formula"),
        pytest.param({"problem": "q", "solution": "72"}, "q", "72", None, id="a number as solution"),
        pytest.param({"prompt": "q", "reward_model": {"ground_truth": Number("1e3")}}, "q", "1e3", None, id="verl with a number"),
        pytest.param({"messages": [USER, ASSISTANT]}, "1+1=", None, "It is 2.", id="TRL messages"),
        pytest.param({"messages": [USER], "answer": "2"}, "1+1=", "2", None, id="TRL messages, no completion"),
        pytest.param({"prompt": [USER], "completion": [ASSISTANT]}, "1+1=", None, "It is 2.", id="TRL prompt and completion"),
        pytest.param({"prompt": "q", "completion": "c", "answer": None}, "q", None, "c", id="TRL texts"),
    ],
)
def test_forms_of_others_are_read(row: dict, question: str, answer: str | None, demonstration: str | None) -> None:
    problem = problem_from(row, "train.jsonl, line 3")
    assert (problem.question, problem.answer, problem.demonstration) == (question, answer, demonstration)
    assert problem.domain == "default"


@pytest.mark.parametrize(
    ("name", "messages", "system", "turns"),
    [
        ("prompt", [USER], None, ["user: 1+1="]),
        ("prompt", [GREETING, USER], "Add.", ["user: 1+1="]),
        ("prompt", [{"role": "system", "content": ""}, USER], "", ["user: 1+1="]),
        ("prompt", [GREETING, USER, ASSISTANT, USER], "Add.", ["user: 1+1=", "assistant: It is 2.", "user: 1+1="]),
        ("messages", [GREETING, USER, ASSISTANT, USER, ASSISTANT], "Add.", ["user: 1+1=", "assistant: It is 2.", "user: 1+1="]),
        (
            "prompt",
            [{**USER, "name": None, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            None,
            ["user: ab"],
        ),
    ],
)
def test_conversations_are_read(name: str, messages: list, system: str | None, turns: list[str]) -> None:
    problem = problem_from({name: messages}, "train.jsonl, line 3")
    assert problem.system_prompt == system
    assert [f"{message.role}: {message.content}" for message in problem.messages] == turns
    assert problem.question == turns[-1].removeprefix("user: ")
