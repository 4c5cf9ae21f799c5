"""The Markdown tables of docs/results.md from run folders: python runs/show_curve.py RUN [RUN ...]"""

import json
import sys
from pathlib import Path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def show(run: Path) -> None:
    print(
        f"\n### {run.name}\n\n| model | step | avg@k | 95 % interval | k | problems | cut off | mean tokens |\n"
        + "| --- " * 8
        + "|"
    )
    for row in rows(run / "evals.jsonl"):
        low, high = row["ci95"]
        print(
            f"| {row['model']} | {row['step']} | {row['avg_at_k']:.1%} | {low:.1%} to {high:.1%} | {row['k']} "
            f"| {row['problems']} | {row['truncation_rate']:.1%} | {row['mean_length']:.1f} |"
        )
    names = ("grade/mean", "teacher/gap", "token_reward/floor_share", "policy/entropy", "ratio/clip_share", "train/grad_norm")
    metrics = rows(run / "metrics.jsonl")
    names = [name for name in names if any(row.get(name) is not None for row in metrics)]
    print("\n| step | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1) + "|")
    every = max(1, len(metrics) // 10)
    for row in metrics:
        if row["step"] == 1 or row["step"] % every == 0:
            print(f"| {row['step']} | " + " | ".join("" if row[name] is None else f"{row[name]:.3f}" for name in names) + " |")
    phases = {name: sum(row.get(f"seconds/{name}") or 0 for row in metrics) for name in ("rollout", "teacher", "update", "step")}
    shares = ", ".join(f"{name} {seconds:.0f} s ({seconds / phases['step']:.0%})" for name, seconds in phases.items())
    print(f"\n{shares}; {metrics[-1]['tokens/total']:,} tokens; peak memory {max(row['memory/peak'] for row in metrics):.1f} GiB")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        show(Path(argument))
