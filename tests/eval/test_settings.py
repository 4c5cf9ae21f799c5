"""An evaluation samples with its own settings and random numbers, and grades every sample of every problem."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.eval.benchmark import Benchmark, evaluate_engine, sampling_dtype, sampling_params
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams
from topd.tasks.grading import Grade, Grader
from topd.tasks.task import Problem
from topd.types import Prompt, Rollout, RolloutGroup

OTHER = {"rollout__temperature": 0.9, "rollout__top_p": 0.8, "rollout__group_size": 3, "rollout__max_completion_tokens": 20}
OWN = {"eval__temperature": 0.5, "eval__top_p": 0.6, "eval__samples_per_problem": 5, "eval__max_completion_tokens": 10}


def params(tmp_path: Path, **changes: object) -> SamplingParams:
    return sampling_params(config_file.load(tiny_config(tmp_path / "run", **OTHER, **changes)))


def test_the_settings_are_those_of_the_evaluation_not_of_the_rollouts(tmp_path: Path) -> None:
    found = params(tmp_path, **OWN)
    assert (found.temperature, found.top_p, found.n, found.max_tokens) == (0.5, 0.6, 5, 10)
    default = params(tmp_path)
    assert (default.temperature, default.top_p, default.max_tokens) == (1.0, 1.0, 20)


def test_the_random_numbers_depend_on_the_seed_of_the_evaluation_alone(tmp_path: Path) -> None:
    base = params(tmp_path).seed
    assert params(tmp_path, run__seed=5).seed == base
    assert params(tmp_path, eval__seed=5).seed not in (base, params(tmp_path, eval__seed=6).seed)
    assert "rollout" not in base  # the stream of training rollouts, whose name also holds the step


@pytest.mark.parametrize(
    ("changes", "student", "teacher"),
    [
        ({}, "float32", "float32"),
        ({"student__dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"teacher__dtype": "bfloat16", "trainer__dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"teacher": {"name": "x", "base_url": ["http://a"], "dtype": "bfloat16"}}, "float32", "bfloat16"),
        (
            {"teacher": None, "teachers": {"a": {"name": "x", "dtype": "bfloat16"}, "b": {"name": "x"}}},
            "float32",
            "a bfloat16, b float32",
        ),
        ({"teacher": None, "teachers": {"a": {"name": "x"}, "b": {"name": "x"}}}, "float32", "float32"),
    ],
)
def test_the_precision_stored_is_that_of_the_model_that_is_sampled(
    tmp_path: Path, changes: dict, student: str, teacher: str
) -> None:
    config = config_file.load(tiny_config(tmp_path, **changes))
    assert sampling_dtype(config, "student") == student
    assert sampling_dtype(config, "teacher") == teacher


class Recorded(EmbeddedEngine):
    """Samples the given texts; remembers how it was asked."""

    context_length, exact = None, True

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        self.texts, self.policy_version = texts, 0

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, on_tokens: object = None, on_groups: Callable = print
    ) -> list[RolloutGroup]:
        self.asked = params

        def rollout(text: str) -> Rollout:
            reason = "length" if text == "cut" else "stop"
            return Rollout(token_ids=(3,) * len(text), logprobs=torch.zeros(len(text)), finish_reason=reason, text=text)

        pairs = list(zip(prompts, self.texts, strict=True))
        groups = [RolloutGroup(prompt=p, rollouts=tuple(map(rollout, texts)), policy_version=0) for p, texts in pairs]
        on_groups(groups[::-1])
        return groups


class ByText(Grader):
    """Compares texts in this process."""

    def __init__(self) -> None:
        self.num_errors = 0

    def submit(self, completion: str, problem: Problem) -> "Future[Grade]":
        graded: Future[Grade] = Future()
        graded.set_result(Grade(grade=float(completion == problem.answer), extracted=completion))
        return graded


@pytest.fixture
def benchmark_() -> Benchmark:
    problems = [Problem(question=f"{i}+0=", answer=str(i)) for i in range(3)]
    prompts = [Prompt(id=f"held/{i}", text="", token_ids=(3,), answer=p.answer, problem=p) for i, p in enumerate(problems)]
    return Benchmark(name="held", prompts=prompts, grader=ByText(), held_out=problems)


def test_every_sample_of_every_problem_is_graded_against_its_own_answer(benchmark_: Benchmark) -> None:
    engine = Recorded([["0", "0", "x"], ["y", "1", "cut"], ["1", "0", "yy"]])
    asked = SamplingParams(n=3, max_tokens=9, temperature=0.5, top_p=0.6, seed=(7, "eval"))
    row = evaluate_engine(engine, benchmark_, asked, dtype="bfloat16", on_tokens=lambda number: None)
    assert engine.asked == asked
    assert row["avg_at_k"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert row["pass_at"]["3"]["value"] == pytest.approx(2 / 3)
    assert (row["k"], row["problems"], row["temperature"], row["top_p"], row["max_completion_tokens"]) == (3, 3, 0.5, 0.6, 9)
    assert (row["engine"], row["dtype"]) == ("embedded", "bfloat16")
    assert row["truncation_rate"] == pytest.approx(1 / 9)
    assert row["mean_length"] == pytest.approx((7 * 1 + 3 + 2) / 9)
