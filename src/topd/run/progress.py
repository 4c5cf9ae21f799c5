"""Console output of a run: a live bar per phase on a terminal, plain lines elsewhere, one line per step; and the clock."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class SteadyConsole(Console):
    """A console that becomes silent when its reader closes the pipe (`topd train ... | head`), instead of ending the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Bars and lines on the console, and the seconds spent in each phase since `start_step`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SteadyConsole(soft_wrap=True, highlight=False)
        self._seconds: dict[str, float] = {}
        self._step_began = time.perf_counter()

    def start_step(self) -> None:
        self._seconds = {}
        self._step_began = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of this step, and of the whole step so far."""
        return {**self._seconds, "step": time.perf_counter() - self._step_began}

    @contextmanager
    def phase(self, name: str, label: str = "", *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Time and display a phase. Yields a function to call with the number of tokens just processed."""
        began = time.perf_counter()
        try:
            if self.console.is_terminal:
                with self._bar() as bar:
                    task = bar.add_task(f"{name:<8}{label}", total=total)
                    yield lambda num_tokens: bar.advance(task, num_tokens)
            else:
                if name == "eval":  # minutes on a real model; other phases are reported with their step
                    self.line(f"evaluating {label} ...")
                yield lambda num_tokens: None
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def _bar(self) -> Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), _TokensPerSecond(), TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True)

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk under stdout must not end a run
            self.console.print(text, markup=False)

    def step_line(self, row: Mapping[str, Any], *, steps: int) -> None:
        """Print one line about a finished step, without metrics that do not apply."""
        width = len(str(steps))
        parts = [f"step {row['step']:>{width}}/{steps}"]
        for label, name, form in _LINE:
            if row.get(name) is not None:
                parts.append(f"{label} {row[name]:{form}}")
        if row.get("teacher/dropped_groups"):
            parts.append(f"DROPPED {row['teacher/dropped_groups']} groups")
        self.line("  ".join(parts))


_LINE = (
    ("grade", "grade/mean", ".3f"),
    ("gap", "teacher/gap", ".4f"),
    ("floor", "token_reward/floor_share", ".1%"),
    ("entropy", "policy/entropy", ".3f"),
    ("clip", "ratio/clip_share", ".1%"),
    ("grad", "train/grad_norm", ".2f"),
    ("loss", "train/loss", ".4f"),
    ("len", "completion/mean_length", ".1f"),
    ("cut", "completion/truncation_rate", ".1%"),
    ("tok/s", "tokens_per_second/rollout", ".0f"),
    ("s", "seconds/step", ".1f"),
)


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        if not task.elapsed or not task.completed:
            return Text("")
        return Text(f"{task.completed:,.0f} tokens  {task.completed / task.elapsed:,.0f} tok/s")
