"""What the final answer of a completion is."""

import pytest

from topd.tasks.answers import final_answer, last_boxed


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


def test_whole_text_keeps_several_lines_and_a_box_still_wins() -> None:
    assert final_answer("1 2\n3 4\n", whole_text=True) == "1 2\n3 4"
    assert final_answer("1 2\n\\boxed{3\n4}", whole_text=True) == "3\n4"
    assert final_answer("1 2\n3 4") == "3 4"


@pytest.mark.parametrize(("text", "boxed"), [(r"\boxed{\}}", r"\}"), (r"\boxed{a}{b}", "a"), ("none", None)])
def test_braces_are_counted(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed
