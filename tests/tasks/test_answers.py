"""What the final answer of a completion is."""

import pytest

from topd.tasks.answers import final_answer, in_context, last_boxed


@pytest.mark.parametrize(
    ("pattern", "completion", "answer"),
    [
        (r"answer is (-?\d+)", "the answer is 3, no, the answer is -4.", "-4"),
        (r"([^;]+)$", "1+2=3;3", "3"),
        (r"Answer: (.*)", "Answer: 8\nThis holds because 3+5=8 and not 9", "8"),
        (r"(?s)<a>(.*?)</a>", "<a>two\nlines</a>", "two\nlines"),
        (r"<a>(.*?)</a>", "<a>two\nlines</a>", None),
        (r"(?i)answer: (\w+)", "ANSWER: b", "b"),
        (r"answer is (-?\d*)", "the answer is 3. the answer is x", None),  # an empty last match is no answer
        (r"answer is (-?\d+)", "I do not know \\boxed{3}", None),
    ],
)
def test_a_pattern_is_an_everyday_regular_expression_and_its_last_match_counts(
    pattern: str, completion: str, answer: str | None
) -> None:
    assert final_answer(completion, pattern=pattern) == answer


def test_reasoning_that_the_prompt_began_is_no_answer() -> None:
    assert final_answer(in_context("<|im_start|>assistant\n<think>\n", r"so far \boxed{3} but wait")) is None
    assert final_answer(in_context("<|im_start|>assistant\n<think>\n", r"\boxed{3}</think> It is \boxed{4}")) == "4"
    assert final_answer(in_context("<|im_start|>assistant\n", r"so far \boxed{3} but wait")) == "3"


def test_whole_text_keeps_several_lines_and_a_box_still_wins() -> None:
    assert final_answer("1 2\n3 4\n", whole_text=True) == "1 2\n3 4"
    assert final_answer("1 2\n\\boxed{3\n4}", whole_text=True) == "3\n4"
    assert final_answer("1 2\n3 4") == "3 4"


@pytest.mark.parametrize(("text", "boxed"), [(r"\boxed{\}}", r"\}"), (r"\boxed{a}{b}", "a"), ("none", None)])
def test_braces_are_counted(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed
