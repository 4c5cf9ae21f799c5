"""Any generator, its own scorer, and train and held-out seeds that never meet."""

import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym")

from topd.errors import ConfigError
from topd.tasks.reasoning_gym import Config as ReasoningGymConfig
from topd.tasks.task import make_task


def config(**changes: object) -> ReasoningGymConfig:
    return ReasoningGymConfig(**{"type": "reasoning_gym", "generator": "chain_sum", "train_size": 20, "eval_size": 10, **changes})


@pytest.mark.parametrize("generator", ["chain_sum", "leg_counting", "countdown", "simple_equations", "gsm_symbolic"])
def test_the_generators_own_scorer_accepts_the_right_answer(generator: str) -> None:
    task = make_task(config(generator=generator, train_size=3, eval_size=2), seed=0)
    for problem in [*task.train, *task.held_out]:
        assert problem.domain == generator
        if generator != "countdown":  # its answers are expressions; the stored one is only an example
            assert task.score(problem.answer, problem) == 1.0
        assert task.score("certainly not this", problem) < 0.5


def test_seeds_of_runs_and_held_out_problems_are_disjoint() -> None:
    first, second = make_task(config(), seed=0), make_task(config(), seed=1)
    sources = [{problem.metadata["metadata"]["source_index"] for problem in part} for part in (first.train, second.train)]
    assert sources[0] == set(range(20))
    questions = [{problem.question for problem in task.train} for task in (first, second)]
    assert len(questions[0] & questions[1]) < 5
    assert [p.question for p in first.held_out] == [p.question for p in second.held_out]
    assert not questions[0] & {problem.question for problem in first.held_out}


def test_a_held_out_question_met_again_is_not_trained_on() -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # few different questions: they must collide
    task = make_task(config(params=small, train_size=200, eval_size=50), seed=0)
    assert len(task.train) < 200
    assert not {problem.question for problem in task.train} & {problem.question for problem in task.held_out}


def test_the_global_random_stream_is_left_alone() -> None:
    """In a process of its own: the type checks of the tests draw from that stream themselves."""
    code = """
import random
from topd.tasks.reasoning_gym import Config as ReasoningGymConfig
from topd.tasks.task import make_task
task = ReasoningGymConfig(type="reasoning_gym", generator="leg_counting", train_size=20, eval_size=10)
make_task(task, seed=0)
random.seed(3)
expected = random.random()
random.seed(3)
make_task(task, seed=1)
assert random.random() == expected
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generator": "chain_sums"}, "Close: chain_sum"),
        ({"params": {"min_trems": 2}}, "task.params does not fit"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "task.params does not fit"),
    ],
)
def test_wrong_generators_and_parameters_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_task(config(**changes), seed=0)
