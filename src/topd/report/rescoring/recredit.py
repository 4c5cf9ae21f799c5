"""Credit of a stored step: from parquet streams to an algorithm's own `credit`, and back to arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from topd import algorithms
from topd.algorithms.base import Method
from topd.config import AlgorithmConfig
from topd.errors import ConfigError
from topd.ragged import Ragged
from topd.report.rescoring.difference import Credited
from topd.report.stored_step import StoredStep


def check_stored(step: StoredStep, config: AlgorithmConfig, *, own: str) -> None:
    """Raises ConfigError if an algorithm needs what the rollouts do not hold. `own`: the algorithm of the run itself."""
    method = algorithms.bind(config)
    rollouts = step.rollouts
    missing = ""
    if method.asks_teacher and not all("teacher_logprob" in rollout.streams for rollout in rollouts):
        missing = "teacher log-probs"
    elif not method.samples and config.type != own:
        missing = "demonstrations"
    elif "answer" in method.learns_from and all(group.answer is None for group in step.groups):
        missing = "graded answers"
    elif not all("behaviour_logprob" in rollout.streams for rollout in rollouts):
        missing = "the student's log-probs"
    if missing:
        raise ConfigError(
            f'algorithm.type = "{config.type}" needs {missing}, which the rollouts of step {step.step} do not hold. Only '
            "credit over what was stored can be recomputed; train a new run for the rest."
        )
    smallest = min(len(group.rollouts) for group in step.groups)
    if smallest < config.min_group_size:
        raise ConfigError(
            f'algorithm.type = "{config.type}" with these settings compares the completions of a prompt and needs at least '
            f"{config.min_group_size}; step {step.step} has a group of {smallest}."
        )


def evidence(step: StoredStep) -> Ragged:
    """A stored step as an algorithm's `credit` sees it."""
    rollouts = step.rollouts

    def flat(name: str) -> torch.Tensor | None:
        parts = [rollout.streams.get(name) for rollout in rollouts]
        there = [part for part in parts if part is not None]
        return torch.from_numpy(np.concatenate(there)) if len(there) == len(parts) else None

    streams = {"behaviour_logprobs": flat("behaviour_logprob"), "teacher_logprobs": flat("teacher_logprob")}
    return replace(
        Ragged.of([[rollout.token_ids for rollout in group.rollouts] for group in step.groups]),
        tokens={name: stream for name, stream in streams.items() if stream is not None},
        rollouts={"grades": torch.tensor([rollout.grade for rollout in rollouts], dtype=torch.float32)},
    )


def credited(flat: Ragged, config: AlgorithmConfig) -> Credited:
    """The credit of flat tokens, as float64 arrays."""
    method = algorithms.bind(config)
    credit = method.credit(flat)
    return Credited(
        reward=_array(credit.token_rewards),
        floor=_floor(flat, method),
        advantage=_array(credit.advantages),
        weight=_array(method.weighting(flat.lengths, flat.group_sizes)),
        silent_groups=sum(not part.any() for part in credit.advantages.split(flat.tokens_per_group.tolist())),
    )


def _floor(flat: Ragged, method: Method) -> Any:
    """The reward of each token if the teacher gave it no probability at all: nothing can be lower."""
    if "teacher_logprobs" not in flat:
        return np.full(flat.num_tokens, -np.inf)
    rejected = flat.adding(teacher_logprobs=torch.full_like(flat["teacher_logprobs"], -torch.inf))
    return _array(method.credit(rejected).token_rewards)


def _array(values: torch.Tensor) -> Any:
    return values.to(torch.float64).numpy()
