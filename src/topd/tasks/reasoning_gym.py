"""Problems made by any generator of reasoning-gym, graded by that generator's own scorer."""

import random
from typing import Any

from topd.config import ReasoningGymConfig
from topd.errors import ConfigError
from topd.tasks.task import Problem, Task, split_task

HELD_OUT_SEED = 1_000_000_007
"""Held-out seeds start here, training seeds below: item i of a generator with seed s is made from seed s + i."""


def load(config: ReasoningGymConfig, *, seed: int) -> Task:
    """Training items from seeds `seed * train_size + i`; the held-out set is the same for every seed of a run."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"task.type = \"reasoning_gym\" needs the tasks extra: pip install 'topd[tasks]' ({error}).") from error
    if config.generator not in DATASETS:
        import difflib

        close = difflib.get_close_matches(config.generator, DATASETS, n=3)
        raise ConfigError(
            f'task.generator = "{config.generator}" is no reasoning-gym generator. '
            f"{'Close: ' + ', '.join(close) if close else 'There are ' + str(len(DATASETS)) + ' of them'}."
        )
    first_seed = seed * config.train_size
    if first_seed + config.train_size > HELD_OUT_SEED:
        raise ConfigError(
            f"run.seed = {seed} with task.train_size = {config.train_size} reaches the held-out seeds. Use a smaller run.seed."
        )

    def make(size: int, at: int) -> Any:
        try:
            return reasoning_gym.create_dataset(config.generator, size=size, seed=at, **config.params)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"task.params does not fit the generator {config.generator}: {error}") from error

    state = random.getstate()  # some generators draw from the global stream
    try:
        train, held_out = make(config.train_size, first_seed), make(config.eval_size, HELD_OUT_SEED)
        held_out_problems = [_problem(item, config.generator) for item in held_out]
        train_problems = [_problem(item, config.generator) for item in train]
    finally:
        random.setstate(state)
    return split_task(
        train_problems,
        held_out_problems,
        lambda answer, problem: float(train.score_answer(answer, dict(problem.metadata))),
    )


def _problem(item: dict[str, Any], domain: str) -> Problem:
    return Problem(question=item["question"], answer=str(item["answer"]), domain=domain, metadata=item)
