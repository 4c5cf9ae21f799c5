"""avg@k and pass@k of a model on held-out problems, with intervals; the settings are stored with the number."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from topd.config import Config, TaskConfig
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.ops.estimate import avg_at_k, bootstrap_interval, pass_at_k
from topd.rollout.engine import Engine, SamplingParams
from topd.run.summary import excluded
from topd.tasks.answers import in_context
from topd.tasks.grading import FULL_MARKS, Grade, Grader, make_grader
from topd.tasks.load import load_task
from topd.tasks.prompts import make_prompts
from topd.tasks.task import Problem, Task
from topd.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Rendered held-out problems and how they are graded."""

    name: str
    prompts: Sequence[Prompt]
    grader: Grader
    held_out: Sequence[Problem]
    """All problems that must not be trained on, also those that `eval.max_problems` leaves out."""
    too_long: int = 0
    """Problems above task.max_prompt_tokens: nothing is sampled, and they count as wrong."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """What decides the number beside the sampling: stored in every row."""
    notices: Sequence[str] = ()
    """What a person should know about the problems."""


def load_benchmarks(config: Config, task: Task, model: LanguageModel) -> list[Benchmark]:
    """The configured benchmarks, or the task's own held-out problems. Empty if there are none.

    Their graders are to be closed. Raises ConfigError for a named benchmark without problems.
    """
    named = [(item.name, item.task, load_task(item.task, seed=config.run.seed)) for item in config.eval.benchmarks]
    benchmarks = []
    for name, task_config, loaded in named or [("held_out", config.task, task)]:
        if loaded.held_out:
            benchmarks.append(_benchmark(config, name, task_config, loaded, model))
        elif named:
            raise ConfigError(f'eval.benchmarks: "{name}" has no held-out problems. Set its task.eval_path or eval_split.')
    return benchmarks


def _benchmark(config: Config, name: str, task_config: TaskConfig, task: Task, model: LanguageModel) -> Benchmark:
    problems = task.held_out[: config.eval.max_problems]
    key = "eval" if config.eval.max_completion_tokens else "rollout"
    room = config.eval.max_completion_tokens or config.rollout.max_completion_tokens
    rendered = make_prompts(problems, model, task_config, name=name, room=room, room_key=f"{key}.max_completion_tokens")
    left_out = {
        "duplicates": task.num_duplicates,
        "without_answer": task.num_unanswered,
        "max_problems": len(task.held_out) - len(problems),
    }
    return Benchmark(
        name=name,
        prompts=rendered.prompts,
        grader=make_grader(task, task_config.answer_pattern),
        held_out=task.held_out,
        too_long=len(rendered.too_long),
        stored={
            "left_out": left_out,
            "task": task_config.model_dump(mode="json", exclude={"path", "train_size", "split", "demonstration_column"}),
            "problems_sha256": _sha256([(problem.key, problem.answer) for problem in problems]),
        },
        notices=[
            *rendered.notices(name, too_long_are="they count as wrong"),
            *([f"{name}: {words}"] if (words := excluded({"left_out": left_out | {"max_problems": 0}})) else []),
        ],
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def benchmarks_sha256(benchmarks: Sequence[Benchmark]) -> str:
    """Digest of all problems of all benchmarks: a resumed run must see the same."""
    return _sha256([(benchmark.name, benchmark.stored["problems_sha256"]) for benchmark in benchmarks])


def sampling_params(config: Config) -> SamplingParams:
    """Evaluation draws the same random numbers every time, so that two models are compared on equal luck."""
    return SamplingParams(
        n=config.eval.samples_per_problem,
        max_tokens=config.eval.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        seed=(config.eval.seed, "eval"),
    )


def sampling_dtype(config: Config, model: Literal["student", "teacher"]) -> str:
    """The precision that a model is sampled in; of servers the declared one. Where teachers differ, each by its name."""
    if model == "student":
        return config.student.dtype
    dtypes = {name: teacher.dtype for name, teacher in config.teachers_by_name().items()}
    distinct = set(dtypes.values())
    return distinct.pop() if len(distinct) == 1 else ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())


def evaluate_engine(
    engine: Engine, benchmark: Benchmark, params: SamplingParams, *, dtype: str, on_tokens: Callable[[int], None]
) -> dict[str, Any]:
    """Sample, grade and summarise: one row of evals.jsonl, without the name of the model. Grading goes on beside sampling.

    `dtype`: the precision that the engine samples in, to be stored.
    """
    pending: dict[str, list[Future[Grade]]] = {}

    def grade(groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            if group.prompt.id not in pending:
                prompt = group.prompt
                texts = [in_context(prompt.text, rollout.text) for rollout in group.rollouts]
                pending[prompt.id] = [benchmark.grader.submit(text, prompt.problem) for text in texts]

    groups = engine.generate(benchmark.prompts, params, on_tokens=on_tokens, on_groups=grade)
    grade(groups)
    grades = [[graded.result() for graded in pending[group.prompt.id]] for group in groups]
    scores = np.array([[one.grade for one in of_group] for of_group in grades] + [[0.0] * params.n] * benchmark.too_long)
    flat = [one for of_group in grades for one in of_group]
    return {
        "benchmark": benchmark.name,
        **summarise(scores, seed=0),
        **_lengths(groups),
        "without_answer_rate": sum(one.extracted is None for one in flat) / len(flat),
        "grader_errors": sum(one.error is not None for one in flat),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_completion_tokens": params.max_tokens,
        "seed": params.seed[0],
        "engine": engine.kind,
        "dtype": dtype,
        "too_long": benchmark.too_long,
        **benchmark.stored,
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


def _lengths(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "truncation_rate": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "mean_length": sum(len(r.token_ids) for r in rollouts) / len(rollouts),
    }
