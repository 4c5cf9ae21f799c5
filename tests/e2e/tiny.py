"""A configuration small enough to run in a second or two, on the pair that ships with the package and a few of its problems."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def tiny_config(directory: Path, **changes: Any) -> dict[str, Any]:
    """Two steps of two updates; `changes` are dotted keys with __ for the dot: tiny_config(d, run__steps=3)."""
    config: dict[str, Any] = {
        "student": {"name": "builtin:tiny-student"},
        "teacher": {"name": "builtin:tiny-teacher"},
        "task": {
            "type": "jsonl",
            "path": str(HERE / "sums_train.jsonl"),
            "eval_path": str(HERE / "sums_eval.jsonl"),
            "grader": "exact",
            "answer_pattern": "([^;]+)$",
        },
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 24, "max_concurrent_rollouts": 16},
        "algorithm": {"type": "topd"},
        "trainer": {"minibatch_prompts": 2, "learning_rate": 1e-3},
        "eval": {"samples_per_problem": 2, "max_problems": 4},
        "run": {"directory": str(directory), "steps": 2, "threads": 1, "device": "cpu", "checkpoint_every": 1},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        table = config
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    return config
