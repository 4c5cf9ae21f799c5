"""What an algorithm learns from must be there, problem by problem."""

import pytest

from topd import algorithms
from topd.assemble import check_prompts
from topd.errors import ConfigError
from topd.tasks.task import Problem
from topd.types import Prompt


def prompt(number: int, answer: str | None, demonstration: str | None = None) -> Prompt:
    problem = Problem(question="?", source=f"train.jsonl, line {number}" if number < 9 else "")
    return Prompt(id=f"train/{number}", text="?", token_ids=(1,), answer=answer, demonstration=demonstration, problem=problem)


def test_problems_without_what_the_algorithm_learns_from_are_named() -> None:
    prompts = [prompt(1, "8"), prompt(2, None), prompt(3, None)]
    with pytest.raises(
        ConfigError, match=r'"grpo" learns from answers, which 2 of 3 .*: train\.jsonl, line 2; train\.jsonl, line 3\. Give'
    ):
        check_prompts(prompts, algorithms.bind(algorithms.load("grpo").Config()))
    many = [prompt(number, "8", None if number < 5 or number == 9 else "8") for number in range(2, 10)]
    with pytest.raises(
        ConfigError, match=r"from demonstrations, which 4 of 8 .*line 2; .*line 3; .*line 4; \.\.\.\. Give .* `demonstration`"
    ):
        check_prompts(many, algorithms.bind(algorithms.load("sft").Config()))
    check_prompts(prompts, algorithms.bind(algorithms.load("topd").Config()))
    check_prompts(prompts[:1], algorithms.bind(algorithms.load("grpo").Config()))
    with pytest.raises(ConfigError, match="every training problem is also held out"):
        check_prompts([], algorithms.bind(algorithms.load("topd").Config()))
