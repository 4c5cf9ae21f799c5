"""The life of a run: probe, resume, train step by step (step.py), evaluate, save, end."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from topd.assemble import Parts, assemble, make_trainer, probe, recognise, require
from topd.collect.feed import Feed
from topd.config import Config
from topd.endpoint import meeting
from topd.errors import ConfigError, RunStopped, first_line
from topd.eval.benchmark import Benchmark, benchmarks_sha256, evaluate_engine, sampling_dtype, sampling_params
from topd.models.export import export
from topd.models.proof import make_probe
from topd.models.vocabulary import entries
from topd.record import Record
from topd.rollout.engine import Engine
from topd.run import checkpoint, vocabulary
from topd.run.directory import SCORES, RunDirectory, open_run
from topd.run.interrupt import Interrupted, interruptible, uninterrupted
from topd.run.observer import Observer
from topd.run.progress import Display
from topd.run.summary import gaps, print_summary, summarise_run
from topd.step import train_step


def run(config: Config, display: Display | None = None, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Train to the end, or from where the folder's run stopped. Returns what summary.json holds.

    Raises ConfigError (nothing was spent), RunStopped (resumable) or Interrupted (Ctrl-C, SIGTERM: saved).
    """
    with interruptible(), open_run(config) as directory:
        display = display or Display()
        with naming_memory(), contextlib.ExitStack() as opened:
            for observer in observers:
                opened.enter_context(observer)
            parts = opened.enter_context(contextlib.closing(assemble(config, cache_path=directory.path / SCORES)))
            met = recognise(parts, meeting.read(directory.teachers, directory.digests))
            checks = probe(parts)
            require(checks)
            lost = directory.begin(config, parts.prompts.sha256(), benchmarks_sha256(parts.benchmarks))
            if met:
                meeting.write(directory.teachers, met, directory.digests)
            directory.write_probe([dataclasses.asdict(check) for check in checks])
            vocabulary.write(directory.vocabulary, entries(parts.student), directory.digests.note)
            for warning in [*lost, *(f"{check.name}: {check.detail}" for check in checks if check.warning)]:
                display.line(f"WARNING  {warning}")
            for check in checks:
                if check.unproven and not check.warning:
                    display.line(f"not proven  {check.name}: {check.detail}")
            return Run(parts, directory, display, observers).to_the_end()


@contextmanager
def naming_memory() -> Iterator[None]:
    """Turn an allocation that failed into RunStopped, with the settings that decide how much is needed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise RunStopped(
            f"out of memory: {first_line(error)} In a new run lower trainer.max_tokens_per_microbatch (scoring, "
            "updates) or rollout.max_concurrent_rollouts (sampling), or set trainer.gradient_checkpointing = true."
        ) from error


class Run:
    """One run in progress: the parts, the folder, and how far it has come."""

    def __init__(self, parts: Parts, directory: RunDirectory, display: Display, observers: Sequence[Observer]) -> None:
        self.parts = parts
        self.config = parts.config
        self.directory = directory
        self.display = display
        self.observers = observers
        self.trainer = make_trainer(parts)
        self.benchmarks = [benchmark.name for benchmark in parts.benchmarks]
        self.probe = make_probe(parts.student.tokenizer, [prompt.token_ids for prompt in parts.prompts.prompts[:2]])
        self.feed = Feed(parts, directory, display)
        self.record = Record(parts, directory, display)
        self.steps_done = 0

    def to_the_end(self) -> dict[str, Any]:
        for notice in self.parts.notices:
            self.display.line(notice)
        if not self.parts.benchmarks:
            self.display.line("there are no held-out problems: nothing is evaluated")
        self.resume()
        for observer in self.observers:
            observer.open(self.steps_done)
        try:
            self.evaluate_due(self.steps_done)
            for step in range(self.steps_done + 1, self.config.run.steps + 1):
                self.step(step)
                self.save_due(step)
                self.evaluate_due(step)
        except Interrupted:
            with uninterrupted():  # an impatient second Ctrl-C waits
                saved = self.save()
                self.display.line(f"stopped; saved {saved}. To go on, run the same command with --run.resume true.")
            raise
        except RunStopped:  # the weights are those of the last update; a full disk may refuse this save as well
            with contextlib.suppress(RunStopped):
                self.save()
            raise
        return self.finish()

    def step(self, step: int) -> None:
        """One training step, recorded and shown."""
        self.display.start_step()
        row = train_step(step, self.feed, self.parts.method, self.trainer, self.record)
        with uninterrupted():
            self.directory.add_metrics(row)
            self.trainer.begin_step()
            self.steps_done, self.record.num_tokens = step, int(row["tokens/total"] or 0)
            if self.parts.cache is not None:
                self.parts.cache.step_done()
        self.display.step_line(row, steps=self.config.run.steps)
        for observer in self.observers:
            observer.step(row)

    def resume(self) -> None:
        """Go back to the newest complete checkpoint, if there is one, and forget what came after it."""
        for path in checkpoint.passed_over(self.directory.checkpoints):
            self.display.line(f"WARNING  {path} has lost its {checkpoint.MARKER}, so it is damaged; it is not used")
        newest = checkpoint.newest(self.directory.checkpoints)
        if newest is not None:
            self.steps_done = checkpoint.restore(newest, self.trainer)
            self.parts.engine.load_weights(self.parts.policy.version)
            unproven = "" if checkpoint.is_proven(newest) else " (WARNING  it has no digests: not proven to be undamaged)"
            self.display.line(f"resumed from {newest}{unproven}")
        elif self.config.run.resume:
            self.display.line(f"no checkpoint in {self.directory.checkpoints}: starting from the beginning")
        if self.steps_done + bool(self.trainer.reports) > self.config.run.steps:
            raise ConfigError(
                f"run.steps = {self.config.run.steps}, but the run in {self.directory.path} has gone beyond: its newest "
                f"checkpoint is {newest.name if newest else None}. Set run.steps higher."
            )
        self.directory.forget_after(self.steps_done)
        self.record.num_tokens = next((int(row["tokens/total"]) for row in reversed(self.directory.metrics())), 0)
        for gap in gaps(self.config, self.directory, self.steps_done, self.benchmarks):
            self.display.line(f"WARNING  {gap}")

    def save_due(self, step: int) -> None:
        if step % self.config.run.checkpoint_every == 0 or step == self.config.run.steps:
            self.save()

    def save(self) -> Path:
        keep = self.config.run.keep_checkpoints
        folder = self.directory.checkpoints
        return checkpoint.save(folder, self.trainer, steps_done=self.steps_done, keep=keep, probe=self.probe)

    def evaluate_due(self, step: int) -> None:
        """Evaluate student (and, once, teacher) if this step calls for it and it was not done already."""
        every = self.config.eval.every_steps
        if step not in (0, self.config.run.steps) and not (every and step % every == 0):
            return
        for benchmark in self.parts.benchmarks:
            self.feed.settle()
            self._evaluate("student", step, benchmark, self.parts.engine)
            teacher = self.parts.teacher
            if step == 0 and self.config.eval.teacher and teacher is not None:
                self._evaluate("teacher", step, benchmark, teacher.engine())

    def _evaluate(self, who: Literal["student", "teacher"], step: int, benchmark: Benchmark, engine: Engine) -> None:
        if (who, step, benchmark.name) in {(row["model"], row["step"], row["benchmark"]) for row in self.directory.evaluations()}:
            return
        with self.display.phase("eval", f"{who} on {benchmark.name}") as on_tokens:
            params, dtype = sampling_params(self.config), sampling_dtype(self.config, who)
            result = evaluate_engine(engine, benchmark, params, dtype=dtype, on_tokens=on_tokens)
        self.directory.add_evaluation(row := {"model": who, "step": step, **result})
        for observer in self.observers:
            observer.evaluation(row)
        low, high = row["ci95"]
        self.display.line(
            f"eval {benchmark.name}: {who} at step {step}  avg@{row['k']} {row['avg_at_k']:.1%} "
            f"[{low:.1%}, {high:.1%}] on {row['problems']} problems"
        )

    def finish(self) -> dict[str, Any]:
        """Write the final model, proven to be the policy, and the summary, and show them."""
        export(self.parts.policy, self.directory.model, self.probe, self.directory.digests.note)
        summary = summarise_run(self.config, self.directory, self.benchmarks)
        self.directory.write_summary(summary)
        for observer in self.observers:
            observer.finish(summary)
        print_summary(summary, self.directory.path, self.display.console)
        return summary
