"""The process of one tracker: messages on stdin -> calls of the tracker, an answer to each on stdout.

python -m topd.trackers.child topd.trackers.wandb

The tracker has the process to itself: what it prints is dropped, what it warns of is not shown, and it may exit, hang or crash.
topd.json in the tracker's folder says what it has got, so that a resumed run goes on in the same tracker run and repeats nothing.
"""

import contextlib
import importlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topd.errors import RunStopped, first_line
from topd.run.files import write_json
from topd.trackers.tracker import Start, Tracker
from topd.trackers.values import evaluation_numbers, row_numbers, summary_numbers, summary_table

GRACE_S = 30.0
"""Seconds to finish in when the training process is gone without a word."""


class Session:
    """One tracker run: opens it, and passes on what it has not got yet."""

    def __init__(self, kind: type[Tracker], name: str, *, path: str, config: dict[str, Any], steps_done: int) -> None:
        folder = Path(path) / "trackers" / name
        folder.mkdir(parents=True, exist_ok=True)
        self._record = folder / "topd.json"
        before = json.loads(self._record.read_text(encoding="utf-8")) if self._record.is_file() else {}
        where = kind.where(folder)
        if before.get("where") != where:  # another server or project knows nothing of the run
            before = {}
        self.got: dict[str, Any] = {
            "where": where,
            "run_id": None,
            "step": 0,
            "evaluations": [],
            "summary": 0,
            "calls": 0,
            **before,
        }
        if kind.REWINDS:
            self.got["step"] = min(self.got["step"], steps_done)
            self.got["summary"] = min(self.got["summary"], steps_done)
            self.got["evaluations"] = [key for key in self.got["evaluations"] if key[1] <= steps_done]
        environment = json.loads((Path(path) / "environment.json").read_text(encoding="utf-8"))
        self.tracker = kind(
            Start(
                folder=folder,
                name=Path(path).name,
                config=config,
                environment=environment,
                run_id=self.got["run_id"],
                steps_done=steps_done,
                calls=self.got["calls"],
            )
        )
        self._remember(run_id=self.tracker.run_id)

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] > self.got["step"]:
            self.tracker.log(row["step"], row_numbers(row))
            self._remember(step=row["step"], calls=self.got["calls"] + 1)

    def evaluation(self, row: dict[str, Any]) -> None:
        key = [row["model"], row["step"], row["benchmark"]]
        if key not in self.got["evaluations"]:
            self.tracker.log(row["step"], evaluation_numbers(row))
            self._remember(evaluations=[*self.got["evaluations"], key], calls=self.got["calls"] + 1)

    def finish(self, finish: dict[str, Any]) -> None:
        summary = finish["summary"]
        if summary is not None and summary["steps"] > self.got["summary"]:
            self.tracker.summarise(summary["steps"], summary_numbers(summary), summary_table(summary))
            self._remember(summary=summary["steps"], calls=self.got["calls"] + 1)
        self.tracker.finish(finish["status"])

    def _remember(self, **changes: Any) -> None:
        self.got |= changes
        write_json(self._record, self.got)


def main() -> None:
    answers = _quiet()
    messages = _messages()
    module = sys.argv[1]
    session: Session | None = None
    while True:
        message = messages.get()
        kind, content = next(iter(message.items()))
        try:
            if kind == "begin":
                session = Session(importlib.import_module(module).Run, module.rpartition(".")[2], **content)
            elif session is not None:
                getattr(session, kind)(content)
        except BaseException as error:  # whatever a tracker does, sys.exit included, is told and ends this process alone
            answers(json.dumps({"error": _in_words(error)}))
            os._exit(1)
        answers(json.dumps({"by_hand": session.tracker.by_hand} if session is not None else {}))
        if kind == "finish":
            os._exit(0)  # all is written; the libraries' own handlers may wait for a server


def _in_words(error: BaseException) -> str:
    if isinstance(error, RunStopped) and error.__cause__ is not None:  # topd.json could not be written
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:  # plain words; leave out the number
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {first_line(error)}"


def _quiet() -> Callable[[str], None]:
    """Keep the real stdout for answers and give the tracker none; leave Ctrl-C and SIGTERM to the training process."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)

    def answer(line: str) -> None:
        try:
            out.write(line + "\n")
            out.flush()
        except BrokenPipeError:
            pass  # nobody waits for it: the training process is gone

    return answer


def _messages() -> "queue.Queue[dict[str, Any]]":
    """What comes in on stdin. After its end the tracker is told to finish, and has GRACE_S for it."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a tracker that asks for a key gets no answer

    def read() -> None:
        with contextlib.suppress(ValueError):  # half a line: the training process was killed while it wrote
            for line in lines:
                found.put(json.loads(line))
        found.put({"finish": {"status": "failed", "summary": None}})
        threading.Event().wait(GRACE_S)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return found


if __name__ == "__main__":
    main()
