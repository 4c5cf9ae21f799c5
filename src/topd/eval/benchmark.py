"""avg@k and pass@k of a model on held-out problems, with intervals; the settings are stored with the number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from topd.config import Config
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.ops.estimate import avg_at_k, bootstrap_interval, pass_at_k
from topd.rollout.engine import Engine, SamplingParams
from topd.tasks.grading import Grader
from topd.tasks.load import load_task
from topd.tasks.prompts import make_prompts
from topd.tasks.task import Problem, Task
from topd.types import Prompt, RolloutGroup

FULL_MARKS = 1.0 - 1e-6
"""A completion is right if its grade reaches this; graders may return fractions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Rendered held-out problems and how they are graded."""

    name: str
    prompts: Sequence[Prompt]
    grader: Grader
    held_out: Sequence[Problem]
    """All problems that must not be trained on, also those that `eval.max_problems` leaves out."""


def load_benchmarks(config: Config, task: Task, model: LanguageModel) -> list[Benchmark]:
    """The configured benchmarks, or the task's own held-out problems. Empty if there are none.

    Raises ConfigError for a named benchmark without problems.
    """
    key = "eval" if config.eval.max_completion_tokens else "rollout"
    room = config.eval.max_completion_tokens or config.rollout.max_completion_tokens
    named = [(item.name, item.task, load_task(item.task, seed=config.run.seed)) for item in config.eval.benchmarks]
    benchmarks = []
    for name, task_config, loaded in named or [("held_out", config.task, task)]:
        problems = loaded.held_out[: config.eval.max_problems]
        room_key = f"{key}.max_completion_tokens"
        prompts = make_prompts(problems, model, task_config, name=name, room=room, room_key=room_key).prompts
        if not prompts and named:
            raise ConfigError(f'eval.benchmarks: "{name}" has no held-out problems. Set its task.eval_path or eval_split.')
        if prompts:
            grader = Grader(loaded.score, task_config.answer_pattern)
            benchmarks.append(Benchmark(name=name, prompts=prompts, grader=grader, held_out=loaded.held_out))
    return benchmarks


def sampling_params(config: Config) -> SamplingParams:
    """Evaluation draws the same random numbers every time, so that two models are compared on equal luck."""
    return SamplingParams(
        n=config.eval.samples_per_problem,
        max_tokens=config.eval.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        seed=(config.run.seed, "eval"),
    )


def evaluate_engine(
    engine: Engine, benchmark: Benchmark, params: SamplingParams, *, on_tokens: Callable[[int], None]
) -> dict[str, Any]:
    """Sample, grade and summarise: one row of evals.jsonl, without the name of the model."""
    errors_before = benchmark.grader.num_errors
    groups = engine.generate(benchmark.prompts, params, on_tokens=on_tokens)
    scores = np.array([[_grade(benchmark, group, i) for i in range(params.n)] for group in groups])
    return {
        "benchmark": benchmark.name,
        **summarise(scores, seed=0),
        **_lengths(groups),
        "grader_errors": benchmark.grader.num_errors - errors_before,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_completion_tokens": params.max_tokens,
    }


def summarise(scores: np.ndarray, *, seed: int) -> dict[str, Any]:
    """[problem, sample] grades -> avg@k, pass@k and mean score, with 95 % intervals over problems (cluster bootstrap)."""
    correct = scores >= FULL_MARKS
    problems, k = scores.shape
    at = sorted({2**i for i in range(k.bit_length())} | {k})
    accuracy = avg_at_k(correct.astype(float))
    return {
        "avg_at_k": float(accuracy.mean()),
        "ci95": list(bootstrap_interval(accuracy, seed=seed)),
        "k": k,
        "problems": problems,
        "mean_score": float(scores.mean()),
        "pass_at": {str(j): _with_interval(pass_at_k(correct, j), seed) for j in at},
    }


def _with_interval(per_problem: np.ndarray, seed: int) -> dict[str, Any]:
    return {"value": float(per_problem.mean()), "ci95": list(bootstrap_interval(per_problem, seed=seed))}


def _grade(benchmark: Benchmark, group: RolloutGroup, i: int) -> float:
    return benchmark.grader.grade(group.rollouts[i].text, group.prompt.problem)


def _lengths(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "truncation_rate": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "mean_length": sum(len(r.token_ids) for r in rollouts) / len(rollouts),
    }
