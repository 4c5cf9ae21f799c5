"""End of a run: summary.json and the printed table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topd.config import Config
from topd.run.directory import RunDirectory
from topd.run.gaps import excluded, lost_evaluations, lost_steps

SHORT = ("avg_at_k", "ci95", "k", "problems")


def summarise_run(config: Config, directory: RunDirectory, due: Sequence[str] = ()) -> dict[str, Any]:
    """Results of base, student and teacher on every benchmark; the first also at the top level. `due`: all benchmarks."""
    rows = directory.evaluations()
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    benchmarks = {name: _three([row for row in rows if row["benchmark"] == name], config.run.steps) for name in names}
    metrics = directory.metrics()
    first: dict[str, Any] = benchmarks[names[0]] if names else {"base": None, "student": None, "teacher": None}
    return {
        "algorithm": config.algorithm.type,
        "benchmark": names[0] if names else None,
        **{who: row and {key: row[key] for key in SHORT} for who, row in first.items()},
        "steps": config.run.steps,
        "missing": gaps(config, directory, config.run.steps, due),
        "updates": metrics[-1]["policy_version"] if metrics else 0,
        "tokens": metrics[-1]["tokens/total"] if metrics else 0,
        "seconds": round(sum(row["seconds/step"] for row in metrics), 1),
        "peak_memory_gib": max((row["memory/peak"] for row in metrics), default=None),
        "benchmarks": benchmarks,
    }


def gaps(config: Config, directory: RunDirectory, steps_done: int, benchmarks: Sequence[str]) -> list[str]:
    """Rows missing in metrics.jsonl and evals.jsonl after `steps_done` steps, one sentence each."""
    models = ("student", "teacher") if config.eval.teacher and config.teachers_by_name() else ("student",)
    due = dict.fromkeys(benchmarks, models)
    evaluated = lost_evaluations(directory.evaluations(), due, steps_done, every=config.eval.every_steps)
    return [*lost_steps(directory.metrics(), steps_done), *evaluated]


def _three(rows: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    def of(model: str, step: int) -> dict[str, Any] | None:
        return next((row for row in rows if row["model"] == model and row["step"] == step), None)

    return {"base": of("student", 0), "student": of("student", steps), "teacher": of("teacher", 0)}


def print_summary(summary: dict[str, Any], path: Path, console: Console) -> None:
    """Print one table per benchmark (base, student, teacher), then the paths of the results."""
    for name, three in summary["benchmarks"].items():
        some = next(row for row in three.values() if row)
        title = f"{name}: {some['problems']} problems, {some['k']} samples each"
        if words := excluded(some):
            title += f" ({words})"
        table = Table(title=Text(title), title_justify="left")
        for heading in ("model", f"avg@{some['k']}", "95 % interval", f"pass@{some['k']}", "cut off", "mean tokens"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        for who, row in three.items():
            if row:
                table.add_row(who, *_cells(row))
        console.print(table)
    console.print(
        f"{summary['steps']} steps, {summary['updates']} updates, {summary['tokens']:,} tokens, {summary['seconds']:.0f} s, "
        f"peak memory {summary['peak_memory_gib'] or 0:.1f} GiB"
    )
    for gap in summary["missing"]:
        console.print(f"WARNING  {gap}", markup=False)
    console.print(f"model      {path / 'model'}", f"metrics    {path / 'metrics.jsonl'}", sep="\n", markup=False)
    console.print(f"rollouts   {path / 'rollouts'}", f"summary    {path / 'summary.json'}", sep="\n", markup=False)
    if (path / "report.html").is_file():
        console.print(f"report     {path / 'report.html'}", markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ci95"]
    best = row["pass_at"][max(row["pass_at"], key=int)]["value"]
    return [
        f"{row['avg_at_k']:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{best:.1%}",
        f"{row['truncation_rate']:.1%}",
        f"{row['mean_length']:.1f}",
    ]
