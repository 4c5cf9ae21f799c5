"""The thread that feeds one tracker: queue -> the tracker's process, one message at a time, each answered.

All waiting, for a slow disk, a dead server or a tracker that hangs, is done here and never in the training loop.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""One key, which says what it is: begin, row, evaluation or finish."""

QUEUE_SIZE = 1000
"""Messages that a tracker may be behind before it is given up."""

LONGEST_REASON = 200
"""Characters of what a package says that are shown."""

MODULES = "topd.trackers"
"""Where the modules of the trackers are."""

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_OPAQUE = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{32,}")


class Feeder(threading.Thread):
    """Starts a tracker's process, gives it messages, and remembers the first thing that went wrong in `failure`."""

    def __init__(self, tracker: str, first: Sequence[Message]) -> None:
        super().__init__(name=f"tracker-{tracker}", daemon=True)
        self.tracker = tracker
        self.failure: str | None = None
        self.answered = False
        """Whether it got anything through. A server that is not there never answers."""
        self.has_all = False
        """Whether it was given all there is, and only has to finish."""
        self.by_hand: str | None = None
        """A command that sends what the tracker keeps on this machine."""
        self.begun = time.monotonic()
        self._first = first
        self._queue: queue.Queue[Message] = queue.Queue(QUEUE_SIZE)
        self._process: subprocess.Popen[str] | None = None
        self._ending = False

    def put(self, message: Message) -> None:
        """Never waits: a tracker that cannot keep up has failed."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.fail(f"it is {QUEUE_SIZE} messages behind")

    def fail(self, reason: str) -> None:
        """Switch the tracker off. The first reason stays."""
        if self.failure is None:
            self.failure = without_secrets(reason)
        self._kill()

    def end(self) -> None:
        """Leave no process behind, and no thread that waits for one."""
        self._ending = True
        self._kill()
        self.join(1.0)

    def run(self) -> None:
        try:
            with self._start() as process:
                try:
                    self._feed(process)
                finally:
                    process.kill()  # it has answered the last message, or never will
        except Exception as error:  # a thread has no caller: whatever it is, it is the tracker's failure
            self.fail(f"{type(error).__name__}: {error}")

    def _start(self) -> subprocess.Popen[str]:
        """The tracker's process: out of reach of a Ctrl-C at the keyboard, with the import path of this one."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "topd.trackers.child", f"{MODULES}.{self.tracker}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,
        )
        if self._ending or self.failure is not None:  # given up while the process began
            self._process.kill()
        return self._process

    def _feed(self, process: subprocess.Popen[str]) -> None:
        for message in self._first:
            if not self._deliver(process, message):
                return
        self._first = ()
        while True:
            message = self._queue.get()
            self.has_all = "finish" in message
            if not self._deliver(process, message) or self.has_all:
                return

    def _deliver(self, process: subprocess.Popen[str], message: Message) -> bool:
        """Hand one message over and wait for its answer; False if the tracker has failed."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass  # it is gone: no answer, as below
        found = json.loads(answer) if answer else {"error": f"its process ended ({_how_it_ended(process)})"}
        if error := found.get("error"):
            self.fail(str(error))
            return False
        self.answered = True
        self.by_hand = found.get("by_hand", self.by_hand)
        return True

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _how_it_ended(process: subprocess.Popen[str]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its answers"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def without_secrets(text: str) -> str:
    """One line for the display: no value of a secret environment variable, no credentials in a URL, no long opaque word."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    text = re.sub(r"://[^/\s@]+@", "://***@", text)
    text = _OPAQUE.sub("***", text)
    text = text.strip().split("\n", 1)[0].rstrip(".")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON].rstrip()} [...]"
