"""`topd eval`: a model on the benchmarks of a configuration, without a run."""

from contextlib import closing
from typing import Any

from rich.console import Console

from topd.config import Config
from topd.errors import ConfigError
from topd.eval.benchmark import evaluate_engine, load_benchmarks, sampling_params
from topd.models.device import pick_device, set_threads
from topd.models.load import load
from topd.rollout.embedded import EmbeddedEngine
from topd.run.progress import Display
from topd.tasks.task import make_task


def evaluate_model(name: str, config: Config, display: Display | None = None) -> list[dict[str, Any]]:
    """Evaluate a model: one row per benchmark, as in evals.jsonl; progress on stderr. Raises ConfigError without problems."""
    display = display or Display(Console(stderr=True, soft_wrap=True, highlight=False))
    set_threads(config.run.threads)
    model = load(name, dtype=config.student.dtype, device=pick_device(config.run.device), role="student")
    benchmarks = load_benchmarks(config, make_task(config.task, seed=config.run.seed), model)
    if not benchmarks:
        raise ConfigError(
            "the configuration has no held-out problems. Set task.eval_path (or eval_split), or [[eval.benchmarks]]."
        )
    engine = EmbeddedEngine(model, max_concurrent_rollouts=config.rollout.max_concurrent_rollouts)
    rows = []
    for benchmark in benchmarks:
        for notice in benchmark.notices:
            display.line(notice)
        with closing(benchmark.grader), display.phase("eval", f"{name} on {benchmark.name}") as on_tokens:
            row = evaluate_engine(engine, benchmark, sampling_params(config), dtype=config.student.dtype, on_tokens=on_tokens)
        rows.append({"model": name, **row})
    return rows
