"""A run folder without a run, for tests of trackers, and trackers made of a few lines of source."""

import json
from pathlib import Path
from typing import Any

FAKE = """
import json, os, signal, sys, time
from topd.trackers.tracker import Tracker

class Run(Tracker):
    run_id = "run-1"

    @staticmethod
    def where(folder):
        return os.environ.get("FAKE_WHERE", "here")

    def __init__(self, start):
        self.calls = start.folder / "calls.jsonl"
        (start.folder / "pid").write_text(str(os.getpid()))
        self.note("open", start.steps_done, start.run_id, start.calls, start.name, start.config["run"]["seed"])

    def note(self, *call):
        with self.calls.open("a") as file:
            file.write(json.dumps(call) + "\\n")

    def log(self, step, numbers):
        self.note("log", step, numbers)

    def summarise(self, step, numbers, table):
        self.note("summarise", step, numbers, table.columns, table.rows)

    def finish(self, status):
        self.note("finish", status)
"""
CONFIG = {"run": {"seed": 7}}


def fake(method: str, *lines: str) -> str:
    """The source of a tracker that does `lines` first in a method."""
    head, _, tail = FAKE.partition(f"    def {method}(")
    signature, _, body = tail.partition(":\n")
    return f"{head}    def {method}({signature}:\n" + "".join(f"        {line}\n" for line in lines) + body


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "train/loss": 0.5 + step, "teacher/gap": None, "seconds/step": 1.0, **changes}


def evaluation(step: int, model: str = "student", score: float = 0.5) -> dict[str, Any]:
    ends = [score - 0.25, score + 0.25]
    return {
        "model": model,
        "step": step,
        "benchmark": "held_out",
        "avg_at_k": score,
        "ci95": ends,
        "k": 2,
        "problems": 4,
        "pass_at": {"2": {"value": score, "ci95": ends}},
    }


def summary(steps: int) -> dict[str, Any]:
    three = {"base": evaluation(0), "student": evaluation(steps, score=0.75), "teacher": None}
    return {"algorithm": "topd", "steps": steps, "tokens": 12, "benchmarks": {"held_out": three}}


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "environment.json").write_text(json.dumps({"python": "3", "packages": {"torch": "2"}}))
    return path


def append(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")
    return value


def calls(folder: Path, name: str = "wandb") -> list[list[Any]]:
    file = folder / "trackers" / name / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
