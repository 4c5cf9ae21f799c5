"""Whole runs against servers, small and quiet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tenacity import wait_random_exponential

from tests.e2e.tiny import tiny_config
from topd.config import EndpointConfig
from topd.run.catalogue import VOLATILE


def served_config(directory: Path, *urls: str, **changes: Any) -> dict[str, Any]:
    """`tiny_config` with a served teacher that is asked impatiently, and next to no evaluation.

    One request at a time: then batches in the server, and with them the last bits of its numbers, do not depend on time.
    """
    settings: dict[str, Any] = {
        "teacher__base_url": list(urls),
        "teacher__max_concurrent_requests": 1,
        "teacher__timeout_s": 2.0,
        "teacher__patience_s": 5.0,
        "rollout__max_completion_tokens": 6,
        "eval__max_problems": 1,
        "eval__samples_per_problem": 1,
        "eval__teacher": False,
    }
    return tiny_config(directory, **{**settings, **changes})


def sampling_config(directory: Path, *urls: str, **changes: Any) -> dict[str, Any]:
    """`tiny_config` with rollouts from servers, one request at a time, and next to no evaluation."""
    vllm = {"base_url": list(urls), "max_concurrent_requests": 1, "timeout_s": 2.0, "patience_s": 3.0}
    settings: dict[str, Any] = {
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 12, "engine": "vllm", "vllm": vllm},
        "eval__max_problems": 1,
        "eval__samples_per_problem": 1,
        "eval__teacher": False,
    }
    return tiny_config(directory, **{**settings, **changes})


def section(*urls: str, **changes: Any) -> EndpointConfig:
    """Settings of servers that are asked impatiently."""
    settings = {"api_key_env": "NONE", "max_concurrent_requests": 4, "timeout_s": 2.0, "max_attempts": 3, "patience_s": 3.0}
    return EndpointConfig(base_url=list(urls) or ["http://127.0.0.1:9"], **{**settings, **changes})


def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tries of a request."""
    from topd.endpoint import pool, served

    short = wait_random_exponential(multiplier=0.01, max=0.1)
    for module in (pool, served):
        monkeypatch.setattr(module, "wait_random_exponential", lambda **settings: short)


def train(tree: dict[str, Any], at_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """`topd.train` without the report, with a function that is told of every step before it begins."""
    from topd import config_file
    from topd.loop import run
    from topd.run.progress import Display

    class Telling(Display):
        num_steps = 0

        def start_step(self) -> None:
            self.num_steps += 1
            at_step(self.num_steps)
            super().start_step()

    return run(config_file.load(tree), Telling())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stored(folder: Path, step: int, column: str) -> list[Any]:
    """A column of a step's rollouts, one entry per completion."""
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet")[column].to_pylist()


def assert_same_run(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Same completions, and the same rewards and metrics to within that."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        rows = ({key: value for key, value in row.items() if key not in VOLATILE} for row in (a, b))
        assert next(rows) == pytest.approx(next(rows), abs=tolerance, rel=tolerance)
    for step in range(1, len(metrics(one)) + 1):
        assert stored(one, step, "completion_ids") == stored(other, step, "completion_ids")
        for column in ("teacher_logprobs", "behaviour_logprobs", "token_rewards"):
            pairs = zip(stored(one, step, column), stored(other, step, column), strict=True)
            assert all(a == pytest.approx(b, abs=tolerance) for a, b in pairs), column


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
