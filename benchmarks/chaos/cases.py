"""What all kinds of cases share: a command that ends or is ended, the verdict on it, and the journal of verdicts."""

import collections
import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from tests.processes import CONTEXT, Topd
from tests.run.test_resume import results

VERDICTS = ("exact", "refused", "stopped", "named", "silent", "crash")
"""exact: the result of the healthy run; refused: exit 2 with a reason; stopped: exit 3, and exact once all is well again; named:
another result, and the output says why; silent: another result without a word; crash: a traceback, a hang, a death by signal."""
BAD = ("silent", "crash")
PRELOAD = ["topd.assemble", "topd.loop", "topd.report.page", "topd.run.checkpoint", "topd.report.rescoring.rescore", "pandas"]
CONTEXT.set_forkserver_preload([*PRELOAD, "transformers.models.qwen3.modeling_qwen3", "topd.serve.server", "safetensors.torch"])
LIMIT_S = 240.0
COMMIT = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Outcome:
    row: str
    """Line of the table."""
    verdict: str
    words: str
    signals: int = 0
    """Sent to a process that was alive."""
    case: str = ""
    """Kind, seed and number: enough to repeat it."""
    commit: str = ""
    """Of the code that was tried."""


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None if it had to be killed after LIMIT_S."""

    code: int | None
    output: str

    @property
    def crashed(self) -> bool:
        return self.code not in (0, 2, 3, 130) or "Traceback (most recent" in self.output or "Fatal Python" in self.output

    @property
    def last_words(self) -> str:
        return " ".join(self.output.split())[-600:]


def start(*words: str, imported: bool = True) -> Any:
    """`topd WORDS`, forked from a process that has imported it, or as it is started by hand."""
    if imported:
        return Topd(*words)
    command = [sys.executable, "-m", "topd", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: Any, limit_s: float = LIMIT_S) -> Ended:
    """Wait for its end, and read what it said. What it started may hold its output open for a while, not for ever."""
    late, parts = threading.Event(), []
    timer = threading.Timer(limit_s, lambda: (late.set(), process.kill()))
    reader = threading.Thread(target=lambda: parts.append(process.stdout.read()), daemon=True)
    timer.daemon = True
    timer.start()
    reader.start()
    process.wait()
    timer.cancel()
    reader.join(20)
    if reader.is_alive():
        return Ended(None, "what it started still runs, and holds its output open")
    process.stdout.close()
    return Ended(None, f"no end after {limit_s:g} s. {parts[0]}") if late.is_set() else Ended(process.returncode, parts[0])


def run(*words: str, limit_s: float = LIMIT_S) -> Ended:
    return finish(start(*words), limit_s)


@contextlib.contextmanager
def serving(model: str, *words: str) -> Iterator[str]:
    """The base URL of `topd serve MODEL --batch-invariant`."""
    process = start("serve", model, "--port", "0", "--threads", "1", "--batch-invariant", *words)
    try:
        yield process.stdout.readline().split(" on ")[1].split()[0]
    finally:
        process.kill()
        process.wait()


def warnings(ended: Ended) -> list[str]:
    """Its lines that warn of more than grades, which are low in runs as short as these."""
    return [line for line in ended.output.splitlines() if "WARNING" in line and "grades of the" not in line]


def write_config(folder: Path, tree: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(tree))
    return str(path)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def difference(folder: Path, whole: dict[str, Any]) -> str:
    """The first of a run's results that is not that of the healthy run; "" if none."""
    try:
        now = results(folder)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return next((f"{name} differs" for name in whole if now[name] != whole[name]), "")


class Journal:
    """Outcomes, one JSON object a line. A harness that was stopped goes on where it was."""

    def __init__(self, path: Path, only: str | None = None) -> None:
        self.path, self.only = path, only
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def play(self, case: str, act: Callable[[random.Random], Outcome]) -> None:
        """One case, unless it was played before. Its random choices depend on its name alone."""
        if self.only not in (None, case.split()[-1]) or case in {outcome.case for outcome in self.outcomes}:
            return
        began = time.monotonic()
        outcome = replace(act(random.Random(case)), case=case, commit=COMMIT)
        self.outcomes.append(outcome)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        mark = outcome.verdict.upper() if outcome.verdict in BAD else outcome.verdict
        print(f"{case}  {mark}  {time.monotonic() - began:.1f} s  {outcome.row}: {outcome.words[:1500]}", flush=True)

    def table(self) -> str:
        """In Markdown."""
        rows = sorted({outcome.row for outcome in self.outcomes})
        lines = ["| kind | cases | " + " | ".join(VERDICTS) + " |", "| --- |" + " ---: |" * (len(VERDICTS) + 1)]
        for row in [*rows, "all"]:
            those = [outcome for outcome in self.outcomes if row in (outcome.row, "all")]
            counts = collections.Counter(outcome.verdict for outcome in those)
            lines.append(f"| {row} | {len(those)} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |")
        return "\n".join([*lines, "", f"commit {', '.join(sorted({outcome.commit for outcome in self.outcomes}))}"])
