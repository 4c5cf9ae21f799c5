"""Problems made by any generator of reasoning-gym; that generator's own scorer grades the final answer of a completion."""

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from topd.config import TaskConfig
from topd.errors import ConfigError
from topd.tasks.task import Problem, Task, split_task

HELD_OUT_SEED = 1_000_000_007
"""Held-out seeds start here, training seeds below: item i of a generator with seed s is made from seed s + i."""

# fmt: off
WHOLE_TEXT = frozenset({
    "arc_agi", "binary_matrix", "boxnet", "emoji_mystery", "futoshiki", "graph_color", "kakurasu", "manipulate_matrix",
    "mini_sudoku", "modulo_grid", "n_queens", "pool_matrix", "rearc", "rotate_matrix", "rush_hour", "sentence_reordering",
    "sudoku", "survo", "tower_of_hanoi",
})
# fmt: on
"""Generators whose answers are several lines or whole sentences: without a box the whole completion is the answer."""

ANY = "(any answer that the generator's scorer accepts)"
"""Stands for the right answer where a generator names none."""


class Config(TaskConfig):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    generator: str = Field(description="Name of a reasoning-gym generator, for example chain_sum.")
    params: dict[str, Any] = Field(default_factory=dict, description="Arguments of the generator.")
    train_size: int = Field(10_000, ge=1, description="Training problems.")
    eval_size: int = Field(200, ge=1, description="Held-out problems; their seeds are disjoint from the training seeds.")


@dataclass(frozen=True)
class GeneratorScore:
    """A generator's own scorer, by name and parameters, so that it can be sent to another process."""

    generator: str
    params: Mapping[str, Any]

    @functools.cached_property
    def _dataset(self) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.generator, size=1, seed=0, **self.params)

    def __call__(self, answer: str, problem: Problem) -> float:
        """Score of an answer to one of the generator's items. Raises whatever the generator raises."""
        item = dict(problem.metadata) or {"question": problem.question, "answer": problem.answer, "metadata": {}}
        return float(self._dataset.score_answer(answer, item))


def make(section: Config, *, seed: int) -> Task:
    """Training items from seeds `seed * train_size + i`; the held-out set is the same for every seed of a run."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"task.type = \"reasoning_gym\" needs the tasks extra: pip install 'topd[tasks]' ({error}).") from error
    if section.generator not in DATASETS:
        import difflib

        close = difflib.get_close_matches(section.generator, DATASETS, n=3)
        raise ConfigError(
            f'task.generator = "{section.generator}" is not a reasoning-gym generator. '
            f"{'Close: ' + ', '.join(close) if close else 'There are ' + str(len(DATASETS)) + ' of them'}."
        )
    first_seed = seed * section.train_size
    if first_seed + section.train_size > HELD_OUT_SEED:
        raise ConfigError(
            f"run.seed = {seed} with task.train_size = {section.train_size} reaches the held-out seeds. Use a smaller run.seed."
        )

    def items(size: int, at: int) -> Any:
        try:
            return reasoning_gym.create_dataset(section.generator, size=size, seed=at, **section.params)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"task.params does not fit the generator {section.generator}: {error}") from error

    state = random.getstate()  # some generators draw from the global stream
    try:
        train, held_out = items(section.train_size, first_seed), items(section.eval_size, HELD_OUT_SEED)
        held_out_problems = [_problem(item, section.generator) for item in held_out]
        train_problems = [_problem(item, section.generator) for item in train]
    finally:
        random.setstate(state)
    return split_task(
        train_problems,
        held_out_problems,
        GeneratorScore(section.generator, section.params),
        whole_text=section.generator in WHOLE_TEXT,
    )


def _problem(item: dict[str, Any], domain: str) -> Problem:
    named = item["answer"] is not None
    answer = str(item["answer"]) if named else ANY
    return Problem(question=item["question"], answer=answer, answer_is_named=named, domain=domain, metadata=item)
