"""SIGKILL, SIGINT and SIGTERM at random moments of a run, which is then resumed: its results are those of one never stopped."""

import random
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import Journal, Outcome, difference, finish, fresh, serving, start, write_config
from tests.e2e.tiny import tiny_config
from tests.run.test_resume import results

BASE: dict[str, Any] = {"run__steps": 5, "run__checkpoint_every": 2, "run__keep_checkpoints": 1, "eval__every_steps": 2}
BASE |= {"rollout__max_completion_tokens": 12, "eval__max_problems": 2, "eval__samples_per_problem": 1, "eval__teacher": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "embedded: topd": {},
    "embedded: topd, a checkpoint every step": {"run__checkpoint_every": 1, "run__keep_checkpoints": 3, "trainer__epochs": 2},
    "embedded: grpo, one prompt an update": {"algorithm__type": "grpo", "trainer__minibatch_prompts": 1, "eval__teacher": True},
    "embedded: opd, temperature 0.8": {"algorithm__type": "opd", "rollout__temperature": 0.8, "run__checkpoint_every": 3},
    "served": {"teacher__max_concurrent_requests": 4},
    "served: temperature 0.7": {"rollout__temperature": 0.7, "teacher__max_concurrent_requests": 1},
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
IMPORT_S = 6.0
"""Seconds that a command may take to import everything when nothing was imported before."""


class Kills:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.whole: dict[str, tuple[dict[str, Any], float]] = {}

    def tree(self, name: str, directory: Path) -> dict[str, Any]:
        served = {"teacher__base_url": [self.url], "teacher__patience_s": 60.0} if name.startswith("served") else {}
        return tiny_config(directory, **(BASE | served | SETTINGS[name]))

    def uninterrupted(self, name: str) -> tuple[dict[str, Any], float]:
        """Results, and seconds that it took."""
        if name not in self.whole:
            folder, began = fresh(self.folder / "whole"), time.monotonic()
            ended = finish(start("train", write_config(folder, self.tree(name, folder / "run"))))
            assert ended.code == 0, ended.output
            self.whole[name] = results(folder / "run"), time.monotonic() - began
        return self.whole[name]

    def case(self, source: random.Random) -> Outcome:
        name = source.choice(list(SETTINGS))
        whole, seconds = self.uninterrupted(name)
        folder = fresh(self.folder / "case")
        words = ("train", write_config(folder, self.tree(name, folder / "run")), "--run.resume", "true")
        row, wanted, said = f"kills, {name.split(':')[0]}", source.choice((1, 1, 2, 3)), []
        while len(said) < wanted:
            imported, number = source.random() < 0.8, source.choice(SIGNALS)
            process, wait = start(*words, imported=imported), source.uniform(0.2, seconds + (0 if imported else IMPORT_S))
            end = time.monotonic() + wait
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.005)
            alive = process.poll() is None
            process.send_signal(number)
            ended = finish(process)
            if not alive and ended.code == 0:
                if said:
                    break  # it had come to its end before
                seconds /= 2
                fresh(folder / "run")
                continue
            said.append(f"{number.name} after {wait:.2f} s{'' if imported else ' of the real command'}: exit {ended.code}")
            if (ended.code != -number and ended.crashed) or (ended.code == -number != -signal.SIGKILL and (imported or wait > 1)):
                return Outcome(row, "crash", f"{'; '.join(said)}: {ended.last_words}")
        ended = finish(start(*words))
        verdict = "crash" if ended.crashed else "refused" if ended.code else "exact"
        changed = difference(folder / "run", whole) if verdict == "exact" else ended.last_words
        verdict = "silent" if verdict == "exact" and changed else verdict
        return Outcome(row, verdict, f"{name}; {'; '.join(said)}; {changed}", signals=len(said))


def play(journal: Journal, folder: Path, seed: int, count: int) -> None:
    with serving("builtin:tiny-teacher") as url:
        kills = Kills(folder, url)
        for number in range(count):
            journal.play(f"kills {seed} {number}", kills.case)
