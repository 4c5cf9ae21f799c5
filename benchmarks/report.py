"""Time, memory and size of `topd report` on a long run made up here: python benchmarks/report.py [--steps 200] [--keep FOLDER]

The made-up run has the files of a real one: 200 steps of 256 completions of 512 tokens, a vocabulary of 50,000 entries. With a
browser (see `make test-browser`) it is also told how long the page takes until it can be used.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from topd.run import vocabulary
from topd.run.catalogue import METRICS
from topd.run.columns import ROLLOUTS, UPDATES

VOCABULARY = 50_000
GROUP = 8
WORDS = ("the", "sum", "of", "is", "therefore", "x", "=", "+", "12", "7", "\n", "so", "we", "get", "then", "<b>", "ja", "и", "的")


def make_run(folder: Path, *, steps: int, rollouts: int, tokens: int) -> None:
    """Write the run folder."""
    config: dict[str, dict[str, object]] = {
        "student": {"name": "student"},
        "teacher": {"name": "teacher"},
        "rollout": {"group_size": GROUP, "max_completion_tokens": tokens, "prompts_per_step": rollouts // GROUP},
        "algorithm": {"type": "topd", "alpha": 0.2, "reward": "proximal"},
        "run": {"directory": str(folder), "steps": steps},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / "environment.json").write_text("{}")
    vocabulary.write(
        folder / "vocabulary.parquet", ((i, f" {WORDS[i % len(WORDS)]}".encode(), i == 0) for i in range(VOCABULARY))
    )
    for name in ("rollouts", "updates"):
        (folder / name).mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            random = np.random.default_rng(step)
            file.write(json.dumps({metric.name: float(random.random()) for metric in METRICS} | {"step": step}) + "\n")
            write_step(folder, step, random, rollouts=rollouts, tokens=tokens)


def write_step(folder: Path, step: int, random: np.random.Generator, *, rollouts: int, tokens: int) -> None:
    def ragged(values: np.ndarray) -> pa.ListArray:
        return pa.ListArray.from_arrays(np.arange(rollouts + 1, dtype=np.int32) * tokens, pa.array(values))

    count = rollouts * tokens
    student = -random.exponential(0.3, count).astype(np.float32)
    teacher = np.minimum(student - random.standard_t(2, count).astype(np.float32) * 0.3, 0).astype(np.float32)
    reward = np.logaddexp(np.log(0.2) + teacher - student, np.log(0.8)).astype(np.float32)
    advantage = ((reward - reward.mean()) / reward.std()).astype(np.float32)
    names = [f"train/{step}/{i // GROUP}" for i in range(rollouts)]
    plain = {
        "prompt_id": names,
        "domain": ["default"] * rollouts,
        "prompt": ["What is the sum?"] * rollouts,
        "prompt_ids": [[1, 2, 3]] * rollouts,
        "answer": ["12"] * rollouts,
        "policy_version": [step] * rollouts,
        "completion": ["the sum is 12"] * rollouts,
        "completion_ids": ragged(random.integers(1, VOCABULARY, count, dtype=np.int32)),
        "finish_reason": ["stop"] * rollouts,
        "grade": random.integers(0, 2, rollouts).astype(np.float32),
        "num_grader_errors": np.zeros(rollouts, np.int32),
    }
    logprobs = {name: ragged(student) for name in ("rollout_logprobs", "behaviour_logprobs", "old_logprobs")}
    credit = {"token_rewards": ragged(reward), "returns": ragged(reward), "advantages": ragged(advantage)}
    table = pa.table({**plain, **logprobs, "teacher_logprobs": ragged(teacher), **credit}, schema=ROLLOUTS)
    pq.write_table(table, folder / "rollouts" / f"step_{step:06d}.parquet", compression="zstd", compression_level=1)
    ratio = np.exp(random.normal(0, 0.05, count)).astype(np.float32)
    seen = {
        "prompt_id": names,
        "rollout": np.arange(rollouts, dtype=np.int32) % GROUP,
        "update": np.full(rollouts, step),
        "importance_ratios": ragged(ratio),
        "clipped": ragged(ratio > 1.1),
    }
    updates = pa.table(seen, schema=UPDATES)
    pq.write_table(updates, folder / "updates" / f"step_{step:06d}.parquet", compression="zstd", compression_level=1)


def in_browser(page: Path) -> float | None:
    """Seconds from opening the page until curves and tokens can be used; None without a browser."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        except Error:
            return None
        tab = browser.new_page()
        began = time.perf_counter()
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("html[data-ready]")
        tab.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")  # the page answers again
        seconds = time.perf_counter() - began
        browser.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the run here, or use the one that is here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "long"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            make_run(folder, steps=arguments.steps, rollouts=arguments.rollouts, tokens=arguments.tokens)
        stored = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
        print(
            f"run: {arguments.steps} steps x {arguments.rollouts} x {arguments.tokens} tokens, {stored / 1e6:.0f} MB of parquet"
        )
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "topd", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            opened = in_browser(folder / "report.html")
            size = (folder / "report.html").stat().st_size / 1e6
            usable = "no browser" if opened is None else f"usable after {opened:.2f} s"
            print(f"report: {seconds:.1f} s, peak memory {peak:.2f} GiB, {size:.1f} MB, {usable}")


if __name__ == "__main__":
    main()
