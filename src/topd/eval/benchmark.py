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
from topd.ops.estimate import bootstrap_interval, pass_at_k
from topd.rollout.engine import Engine, SamplingParams
from topd.run.gaps import excluded
from topd.tasks.answers import in_context
from topd.tasks.grading import FULL_MARKS, Grade, Grader, make_grader
from topd.tasks.prompts import make_prompts
from topd.tasks.task import Problem, Task, make_task
from topd.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Rendered held-out problems and their grader."""

    name: str
    prompts: Sequence[Prompt]
    grader: Grader
    held_out: Sequence[Problem]
    """All problems excluded from training, including those left out by `eval.max_problems`."""
    too_long: int = 0
    """Number of problems above task.max_prompt_tokens: not sampled, counted as wrong."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Settings besides sampling that determine the result, stored in every row."""
    notices: Sequence[str] = ()
    """Notices about the problems, for the user."""


def load_benchmarks(config: Config, task: Task, model: LanguageModel) -> list[Benchmark]:
    """Configured benchmarks, or the task's held-out problems. Empty if there are none.

    The caller closes their graders. Raises ConfigError for a named benchmark without problems.
    """
    named = [(item.name, item.task, make_task(item.task, seed=config.run.seed)) for item in config.eval.benchmarks]
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
    """Digest of all problems of all benchmarks; a resumed run must have the same."""
    return _sha256([(benchmark.name, benchmark.stored["problems_sha256"]) for benchmark in benchmarks])


def sampling_params(config: Config) -> SamplingParams:
    """Sampling parameters of evaluation. The seed is fixed, so that all models are compared on the same random numbers."""
    return SamplingParams(
        n=config.eval.samples_per_problem,
        max_tokens=config.eval.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        seed=(config.eval.seed, "eval"),
    )


def sampling_dtype(config: Config, model: Literal["student", "teacher"]) -> str:
    """Precision in which a model is sampled; for servers the declared one. Teachers that differ are listed by name."""
    if model == "student":
        return config.student.dtype
    dtypes = {name: teacher.dtype for name, teacher in config.teachers_by_name().items()}
    distinct = set(dtypes.values())
    return distinct.pop() if len(distinct) == 1 else ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())


def evaluate_engine(
    engine: Engine, benchmark: Benchmark, params: SamplingParams, *, dtype: str, on_tokens: Callable[[int], None]
) -> dict[str, Any]:
    """Sample, grade and summarise: one row of evals.jsonl, without the name of the model. Grading runs during sampling.

    `dtype`: precision in which the engine samples, stored in the row.
    """
    pending: dict[str, list[Future[Grade]]] = {}

    def submit(groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            if group.prompt.id not in pending:
                prompt = group.prompt
                texts = [in_context(prompt.text, rollout.text) for rollout in group.rollouts]
                pending[prompt.id] = [benchmark.grader.submit(text, prompt.problem) for text in texts]

    groups = engine.generate(benchmark.prompts, params, on_tokens=on_tokens, on_groups=submit)
    submit(groups)
    grades = [[graded.result() for graded in pending[group.prompt.id]] for group in groups]
    scores = np.array([[grade.grade for grade in row] for row in grades] + [[0.0] * params.n] * benchmark.too_long)
    flat = [grade for row in grades for grade in row]
    return {
        "benchmark": benchmark.name,
        **summarise(scores, seed=0),
        **_lengths(groups),
        "without_answer_rate": sum(grade.extracted is None for grade in flat) / len(flat),
        "grader_errors": sum(grade.error is not None for grade in flat),
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
    ks = sorted({2**i for i in range(k.bit_length())} | {k})
    accuracy = correct.mean(axis=1)
    return {
        "avg_at_k": float(accuracy.mean()),
        "ci95": list(bootstrap_interval(accuracy, seed=seed)),
        "k": k,
        "problems": problems,
        "mean_score": float(scores.mean()),
        "pass_at": {str(j): _with_interval(pass_at_k(correct, j), seed) for j in ks},
    }


def _with_interval(per_problem: np.ndarray, seed: int) -> dict[str, Any]:
    return {"value": float(per_problem.mean()), "ci95": list(bootstrap_interval(per_problem, seed=seed))}


def _lengths(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "truncation_rate": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "mean_length": sum(len(r.token_ids) for r in rollouts) / len(rollouts),
    }
