"""TOP-D beside OPD and GRPO on the quickstart, several seeds: python runs/compare.py [--seeds 3] [--work runs/compare]

One changed setting per method, the same number of updates for all; except opd-1, the paper's OPD protocol with one update per
rollout batch, which changes three. Prints the table of docs/results.md; finished runs are not made again.
"""

import argparse
import json
import statistics
from pathlib import Path

import topd
from topd import config_file

ARMS: dict[str, list[str]] = {
    "topd": ["--algorithm.type", "topd"],
    "topd, immediate return": ["--algorithm.type", "topd", "--algorithm.returns", "immediate"],
    "topd, log-ratio reward": ["--algorithm.type", "topd", "--algorithm.reward", "log_ratio"],
    "opd": ["--algorithm.type", "opd"],
    "opd-1": ["--algorithm.type", "opd", "--trainer.minibatch_prompts", "64", "--trainer.warmup_updates", "1"],
    "grpo": ["--algorithm.type", "grpo"],
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--work", type=Path, default=Path("runs/compare"))
    options = arguments.parse_args()
    print(
        "| method | updates a step | avg@16, mean of seeds | each seed | largest gradient norm | seconds |\n" + "| --- " * 6 + "|"
    )
    for name, words in ARMS.items():
        summaries, norms = [], []
        for seed in range(options.seeds):
            directory = options.work / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
            if not (directory / "summary.json").is_file():
                here = ["--run.directory", str(directory), "--run.seed", str(seed), "--run.resume", "true"]
                topd.train(config_file.load("quickstart", [*words, *here]))
            summaries.append(json.loads((directory / "summary.json").read_text()))
            rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            norms.append(max(row["train/grad_norm_max"] for row in rows))
        scores = [summary["student"]["avg_at_k"] for summary in summaries]
        each = ", ".join(f"{score:.1%}" for score in scores)
        seconds = statistics.median(summary["seconds"] for summary in summaries)
        updates = summaries[0]["updates"] // summaries[0]["steps"]
        print(f"| {name} | {updates} | {statistics.mean(scores):.1%} | {each} | {max(norms):.1f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
