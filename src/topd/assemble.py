"""`Config` -> the parts of a run, proven to fit: models, engine, teacher, task, trainer."""

import dataclasses
import hashlib
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
from topd.models.policy import Policy, frozen_copy
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import Engine, SamplingParams
from topd.rollout.handover import FilesTransport, Transport
from topd.rollout.vllm import VllmEngine
from topd.tasks.grading import Grader, make_grader
from topd.tasks.load import load_task
from topd.tasks.prompts import PromptStream, RenderedPrompts, make_prompts
from topd.tasks.task import without_leaks
from topd.teacher.endpoint import EndpointTeacher
from topd.teacher.fit import end_token_map
from topd.teacher.local import LocalTeacher
from topd.teacher.probe import check_run
from topd.teacher.probe_grades import check_gold, check_grades
from topd.teacher.routed import RoutedTeacher, routes
from topd.teacher.teacher import Check
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
    engine: EmbeddedEngine | VllmEngine
    teacher: LocalTeacher | EndpointTeacher | RoutedTeacher | None
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
    task = load_task(config.task, seed=config.run.seed)
    policy = load_policy(config, device)
    benchmarks = load_benchmarks(config, task, policy.model)
    train = without_leaks(task.train, [problem for benchmark in benchmarks for problem in benchmark.held_out])
    rendered = make_prompts(train, policy.model, config.task, name="train", room=config.rollout.max_completion_tokens)
    prompts = rendered.prompts
    check_prompts(prompts, method)
    transport = make_transport(config, opened) if config.rollout.engine == "vllm" else None
    has_served = any(teacher.base_url for teacher in config.teachers_by_name().values())
    cache = opened.enter_context(closing(ScoreCache(cache_path))) if cache_path and has_served else None
    grader = opened.enter_context(closing(make_grader(task, config.task.answer_pattern)))
    for benchmark in benchmarks:
        opened.callback(benchmark.grader.close)
    background = opened.enter_context(closing(Background()))  # last, so that it ends before what it uses
    return Parts(
        config=config,
        device=device,
        prompts=PromptStream(prompts, per_step=config.rollout.prompts_per_step, seed=config.run.seed),
        grader=grader,
        method=method,
        policy=policy,
        engine=VllmEngine(config, policy, background, transport=transport) if transport else make_engine(config, policy),
        teacher=make_teacher(config, policy.model, prompts, benchmarks if config.eval.teacher else [], background, cache),
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


def make_engine(config: Config, policy: Policy) -> EmbeddedEngine:
    """Sampling from the policy itself, or from a copy where the precisions differ."""
    rows = config.rollout.max_concurrent_rollouts
    if config.student.dtype == "float32":
        sampler = dataclasses.replace(policy.model, autocast_dtype=None)
    else:
        sampler = frozen_copy(policy.model, getattr(torch, config.student.dtype))
    return EmbeddedEngine(sampler, max_concurrent_rollouts=rows, policy=policy)


def make_transport(config: Config, opened: ExitStack) -> Transport:
    """Transport of `rollout.weights` to servers. Raises ConfigError if a package it needs is not installed."""
    if config.rollout.weights == "nccl":
        from topd.rollout.nccl import NcclTransport

        return opened.enter_context(closing(NcclTransport()))
    run = Path(config.run.directory).expanduser()
    shared = config.rollout.weights_directory
    own = f"topd-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"  # runs may share that folder
    folder = Path(shared).expanduser() / own if shared else run / "handover"
    return opened.enter_context(closing(FilesTransport(folder)))


def make_teacher(
    config: Config,
    student: LanguageModel,
    prompts: Sequence[Prompt],
    benchmarks: Sequence[Benchmark],
    background: Background,
    cache: ScoreCache | None,
) -> LocalTeacher | EndpointTeacher | RoutedTeacher | None:
    """The teacher of `[teacher]`, those of `[teachers]` by the domains of prompts, or None."""
    sections = config.teachers_by_name()
    if not sections:
        return None
    if config.teacher is not None:
        return make_one_teacher(config, "teacher", config.teacher, student, background, cache)
    asked = [*prompts, *(prompt for benchmark in benchmarks for prompt in benchmark.prompts)]
    by_domain = routes({name: section.domains for name, section in sections.items()}, asked)
    made = {
        name: make_one_teacher(config, f"teachers.{name}", section, student, background, cache)
        for name, section in sections.items()
    }
    return RoutedTeacher(made, by_domain)


def make_one_teacher(
    config: Config,
    role: str,
    section: TeacherConfig,
    student: LanguageModel,
    background: Background,
    cache: ScoreCache | None,
) -> LocalTeacher | EndpointTeacher:
    """`role` is the name of its section, for messages."""
    at = config.rollout.temperature
    if section.base_url is not None:
        return EndpointTeacher(section, background, role=role, student=student, temperature=at, cache=cache)
    model = load(section.name, dtype=section.dtype, device=student.device, role=role)
    return LocalTeacher(
        model,
        temperature=at,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        max_concurrent_rollouts=max(config.rollout.max_concurrent_rollouts, config.eval.samples_per_problem),
        map_eos=end_token_map(student.eos_token_ids, model.eos_token_ids) if section.map_eos else None,
    )


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
