"""`Config` -> the parts of a run, proven to fit: models, engine, teacher, task, trainer."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from topd import algorithms
from topd.algorithms.base import Method
from topd.config import Config, TeacherConfig
from topd.endpoint.background import Background
from topd.endpoint.cache import ScoreCache
from topd.endpoint.meeting import Meeting
from topd.errors import ConfigError
from topd.eval.benchmark import Benchmark, load_benchmarks
from topd.models.device import pick_device, set_threads
from topd.models.language_model import LanguageModel
from topd.models.load import load, with_adapters
from topd.models.policy import Policy
from topd.plugins import ENGINE, TEACHER
from topd.rollout.engine import Engine, Resources, SamplingParams
from topd.tasks.grading import Grader, make_grader
from topd.tasks.prompts import PromptStream, RenderedPrompts, make_prompts
from topd.tasks.task import make_task, without_leaks
from topd.teacher.local import LocalTeacher
from topd.teacher.probe import check_run
from topd.teacher.probe_grades import check_gold, check_grades
from topd.teacher.routed import RoutedTeacher, routes
from topd.teacher.served import EndpointTeacher
from topd.teacher.teacher import Check, OneTeacher
from topd.trainer.step import Trainer
from topd.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Components of a run. `policy` owns the weights that train; `engine` samples from them or from a copy."""

    config: Config
    device: torch.device
    prompts: PromptStream
    grader: Grader
    method: Method
    policy: Policy
    engine: Engine
    teacher: OneTeacher | RoutedTeacher | None
    """It may be there to be evaluated only."""
    benchmarks: Sequence[Benchmark]
    notices: Sequence[str]
    """Notices for the user, such as rows left out of the data."""
    cache: ScoreCache | None
    """Store for the scores of served teachers until the step is stored."""
    opened: ExitStack
    """Connections and files, closed by `close`."""

    def close(self) -> None:
        """Close what was opened."""
        self.opened.close()

    @property
    def asks_teacher(self) -> bool:
        """True if credit uses a teacher's log-probs."""
        return self.teacher is not None and self.method.asks_teacher

    @property
    def teacher_of(self) -> Mapping[str, str]:
        """Domain -> name of its teacher, where there are several."""
        return self.teacher.routes if isinstance(self.teacher, RoutedTeacher) else {}

    @property
    def served_teachers(self) -> Sequence[EndpointTeacher]:
        teachers = self.teacher.teachers.values() if isinstance(self.teacher, RoutedTeacher) else [self.teacher]
        return [teacher for teacher in teachers if isinstance(teacher, EndpointTeacher)]

    @property
    def student(self) -> LanguageModel:
        """The policy as a model: tokenizer, device, log-probs."""
        return self.policy.model


def assemble(config: Config, *, cache_path: Path | None = None) -> Parts:
    """Load, connect and build everything.

    `cache_path`: where scores of served teachers may be kept. Raises ConfigError for whatever does not exist or cannot be used.
    """
    with ExitStack() as opened:
        return _assemble(config, cache_path, opened)


def _assemble(config: Config, cache_path: Path | None, opened: ExitStack) -> Parts:
    device = pick_device(config.run.device)
    set_threads(config.run.threads)
    method = algorithms.bind(config.algorithm)
    task = make_task(config.task, seed=config.run.seed)
    policy = load_policy(config, device)
    benchmarks = load_benchmarks(config, task, policy.model)
    train = without_leaks(task.train, [problem for benchmark in benchmarks for problem in benchmark.held_out])
    rendered = make_prompts(train, policy.model, config.task, name="train", room=config.rollout.max_completion_tokens)
    prompts = rendered.prompts
    check_prompts(prompts, method)
    cache = opened.enter_context(closing(ScoreCache(cache_path))) if cache_path and config.served_teachers() else None
    grader = opened.enter_context(closing(make_grader(task, config.task.answer_pattern)))
    for benchmark in benchmarks:
        opened.callback(benchmark.grader.close)
    closed_last = opened.enter_context(ExitStack())
    background = opened.enter_context(closing(Background()))  # last, so that it ends before what it uses
    resources = Resources(background=background, opened=closed_last, cache=cache)
    return Parts(
        config=config,
        device=device,
        prompts=PromptStream(prompts, per_step=config.rollout.prompts_per_step, seed=config.run.seed),
        grader=grader,
        method=method,
        policy=policy,
        engine=ENGINE.load(config.rollout.engine).make(config.rollout.options, config=config, policy=policy, resources=resources),
        teacher=make_teacher(config, policy.model, prompts, benchmarks if config.eval.teacher else [], resources),
        benchmarks=benchmarks,
        notices=_notices(task.num_leaks + len(task.train) - len(train), rendered, benchmarks),
        cache=cache,
        opened=opened.pop_all(),
    )


def _notices(num_leaks: int, rendered: RenderedPrompts, benchmarks: Sequence[Benchmark]) -> list[str]:
    leaks = [f"{num_leaks} training problems are also held out: they are not trained on"] if num_leaks else []
    of_train = rendered.notices("train", too_long_are="they are not trained on")
    return [*leaks, *of_train, *(line for benchmark in benchmarks for line in benchmark.notices)]


def check_prompts(prompts: Sequence[Prompt], method: Method) -> None:
    """Raise ConfigError if there are no prompts, or they lack what the algorithm learns from."""
    if not prompts:
        raise ConfigError("every training problem is also held out by a benchmark. Give other problems to train on.")
    for field in method.learns_from:
        lacking = [prompt for prompt in prompts if getattr(prompt, field) is None]
        if lacking:
            named = "; ".join(prompt.problem.source or prompt.id for prompt in lacking[:3])
            raise ConfigError(
                f'algorithm.type = "{method.name}" learns from {field}s, which {len(lacking)} of {len(prompts)} training '
                f"problems lack: {named}{'; ...' if len(lacking) > 3 else ''}. Give them the field `{field}`, or leave them out."
            )


def load_policy(config: Config, device: torch.device) -> Policy:
    """The student in float32 master weights, with adapters if asked, and the trainer's precision for its forward pass."""
    student = load(config.student.name, dtype="float32", device=device, role="student")
    if config.student.lora is not None:
        student = with_adapters(student, config.student.lora, seed=config.run.seed)
    if config.trainer.dtype != "float32":
        student = dataclasses.replace(student, autocast_dtype=getattr(torch, config.trainer.dtype))
    return Policy(student, config.trainer)


def make_teacher(
    config: Config,
    student: LanguageModel,
    prompts: Sequence[Prompt],
    benchmarks: Sequence[Benchmark],
    resources: Resources,
) -> OneTeacher | RoutedTeacher | None:
    """The teacher of `[teacher]`, those of `[teachers]` by the domains of prompts, or None."""
    sections = config.teachers_by_name()

    def make(role: str, section: TeacherConfig) -> OneTeacher:
        teacher: OneTeacher = TEACHER.make(section, role=role, config=config, student=student, resources=resources)
        return teacher

    if config.teacher is not None or not sections:
        return make("teacher", config.teacher) if config.teacher is not None else None
    asked = [*prompts, *(prompt for benchmark in benchmarks for prompt in benchmark.prompts)]
    by_domain = routes({name: section.domains for name, section in sections.items()}, asked)
    return RoutedTeacher({name: make(f"teachers.{name}", section) for name, section in sections.items()}, by_domain)


def recognise(parts: Parts, met: Mapping[str, Meeting]) -> dict[str, Meeting]:
    """Identities of the served teachers by section, from `met` if known there. Raises ConfigError if one has changed."""
    for teacher in parts.served_teachers:
        if teacher.role in met:
            teacher.recognise(met[teacher.role])
    return {teacher.role: met.get(teacher.role, teacher.meeting) for teacher in parts.served_teachers}


def probe(parts: Parts) -> list[Check]:
    """All checks of teacher/probe.py; those of the run are made only if the two models fit at all."""
    checks = parts.teacher.checks(parts.student, asked=parts.asks_teacher) if parts.teacher is not None else []
    if parts.method.samples and all(check.ok for check in checks):
        checks += check_run(
            parts.config,
            student=parts.student,
            engine=parts.engine,
            teacher=parts.teacher if parts.asks_teacher else None,
            wanted=parts.method.wanted,
            prompts=parts.prompts.prompts,
            evaluated=[prompt for benchmark in parts.benchmarks for prompt in benchmark.prompts],
        )
    if parts.method.samples and all(check.ok for check in checks):
        checks += _grades(parts)
    return checks


def _grades(parts: Parts) -> Iterator[Check]:
    """Grade right answers, and a few completions of the student and of a local teacher."""
    config, prompts = parts.config, parts.prompts.prompts
    yield from check_gold(parts.grader, prompts)
    params = SamplingParams(
        n=1,
        max_tokens=config.rollout.max_completion_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        seed=(config.run.seed, "probe"),
    )
    engines: dict[str, Engine] = {"student": parts.engine}
    if isinstance(parts.teacher, LocalTeacher):
        engines["teacher"] = parts.teacher.engine()
    yield from check_grades(engines, parts.grader, prompts, params)


def require(checks: Sequence[Check]) -> None:
    """Raise ConfigError if any check failed, with all the failures."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if failed:
        raise ConfigError("teacher, student and task do not fit:\n" + "\n".join(failed))


def make_trainer(parts: Parts) -> Trainer:
    config = parts.config
    per_step = config.trainer.epochs * config.rollout.prompts_per_step // config.trainer.minibatch_prompts
    return Trainer(
        parts.policy,
        parts.method,
        config.trainer,
        temperature=config.rollout.temperature,
        total_updates=config.run.steps * per_step,
    )
