"""`Config` -> the parts of a run, proven to fit: models, engine, teacher, task, trainer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from topd import algorithms
from topd.algorithms.base import Algorithm
from topd.config import Config
from topd.errors import ConfigError
from topd.eval.benchmark import Benchmark, load_benchmarks
from topd.models.device import pick_device, set_threads
from topd.models.language_model import LanguageModel
from topd.models.load import load, replica, with_adapters
from topd.rollout.embedded import EmbeddedEngine
from topd.tasks.grading import Grader
from topd.tasks.load import load_task
from topd.tasks.prompts import PromptStream, make_prompts
from topd.tasks.task import without_leaks
from topd.teacher.local import LocalTeacher
from topd.teacher.probe import Check, check_end_tokens, check_run, check_vocabulary, end_token_map
from topd.trainer.step import Trainer
from topd.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of. `policy` holds the weights that train; `engine` samples from them or from a replica."""

    config: Config
    device: torch.device
    prompts: PromptStream
    grader: Grader
    algorithm: Algorithm
    policy: LanguageModel
    engine: EmbeddedEngine
    teacher_model: LanguageModel | None
    teacher: LocalTeacher | None
    """What credit asks; None if the algorithm asks no teacher. Its model may still be there, to be evaluated."""
    benchmarks: Sequence[Benchmark]
    num_leaks: int
    """Training problems left out because a benchmark asks the same question."""

    @property
    def samples(self) -> bool:
        return "demonstrations" not in self.algorithm.NEEDS


def assemble(config: Config) -> Parts:
    """Load and build everything. Raises ConfigError for whatever does not exist or cannot be used."""
    device = pick_device(config.run.device)
    set_threads(config.run.threads)
    algorithm = algorithms.load(config.algorithm.type)
    task = load_task(config.task, seed=config.run.seed)
    policy = load_policy(config, device)
    engine = make_engine(config, policy)
    benchmarks = load_benchmarks(config, task, policy)
    train = without_leaks(task.train, [problem for benchmark in benchmarks for problem in benchmark.held_out])
    prompts = make_prompts(train, policy, config.task, name="train", room=config.rollout.max_completion_tokens)
    check_prompts(prompts, algorithm, config.algorithm.type)
    teacher_model = (
        load(config.teacher.name, dtype=config.teacher.dtype, device=device, role="teacher") if config.teacher else None
    )
    needs_teacher = teacher_model is not None and "teacher_logprobs" in algorithm.NEEDS
    return Parts(
        config=config,
        device=device,
        prompts=PromptStream(prompts, per_step=config.rollout.prompts_per_step, seed=config.run.seed),
        grader=Grader(task.score, config.task.answer_pattern),
        algorithm=algorithm,
        policy=policy,
        engine=engine,
        teacher_model=teacher_model,
        teacher=make_teacher(config, policy, teacher_model) if needs_teacher else None,
        benchmarks=benchmarks,
        num_leaks=len(task.train) - len(train),
    )


def check_prompts(prompts: Sequence[Prompt], algorithm: Algorithm, name: str) -> None:
    """Raise ConfigError if there are no prompts, or they lack what the algorithm learns from."""
    if not prompts:
        raise ConfigError("every training problem is also held out by a benchmark. Give other problems to train on.")
    if "answers" in algorithm.NEEDS and all(prompt.answer is None for prompt in prompts):
        raise ConfigError(
            f'algorithm.type = "{name}" learns from grades, but no training problem has an answer to grade against. Add answers '
            "to the data, or choose an algorithm that learns from a teacher."
        )
    bare = next((prompt for prompt in prompts if prompt.demonstration is None), None)
    if "demonstrations" in algorithm.NEEDS and bare is not None:
        raise ConfigError(
            f'algorithm.type = "{name}" learns from demonstrations, but prompt {bare.id} has none. Add the field `demonstration` '
            "to every line of the data."
        )


def load_policy(config: Config, device: torch.device) -> LanguageModel:
    """The student in float32 master weights, with adapters if asked, and the trainer's precision for its forward pass."""
    policy = load(config.student.name, dtype="float32", device=device, role="student")
    if config.student.lora is not None:
        policy = with_adapters(policy, config.student.lora, seed=config.run.seed)
    if config.trainer.dtype != "float32":
        policy = dataclasses.replace(policy, autocast_dtype=getattr(torch, config.trainer.dtype))
    return policy


def make_engine(config: Config, policy: LanguageModel) -> EmbeddedEngine:
    """Sampling from the policy itself, or from a replica where the precisions differ."""
    rows = config.rollout.max_concurrent_rollouts
    if config.student.dtype == "float32":
        sampler = dataclasses.replace(policy, autocast_dtype=None)
        return EmbeddedEngine(sampler, max_concurrent_rollouts=rows)
    sampler = replica(policy, getattr(torch, config.student.dtype))
    return EmbeddedEngine(sampler, max_concurrent_rollouts=rows, policy=policy)


def make_teacher(config: Config, policy: LanguageModel, model: LanguageModel | None) -> LocalTeacher:
    assert model is not None
    assert config.teacher is not None
    return LocalTeacher(
        model,
        temperature=config.rollout.temperature,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        map_eos=end_token_map(policy, model) if config.teacher.map_eos else None,
    )


def probe(parts: Parts) -> list[Check]:
    """All checks of teacher/probe.py; those of the run are made only if the two models fit at all."""
    checks: list[Check] = []
    if parts.teacher_model is not None and parts.config.teacher is not None:
        checks.append(check_vocabulary(parts.policy, parts.teacher_model))  # also of a teacher that is only evaluated
        if parts.teacher is not None and checks[0].ok:
            checks.append(check_end_tokens(parts.policy, parts.teacher_model, parts.config.teacher.map_eos))
    if parts.samples and all(check.ok for check in checks):
        checks += check_run(
            parts.config,
            student=parts.policy,
            engine=parts.engine,
            teacher=parts.teacher,
            teacher_context=parts.teacher_model.context_length if parts.teacher_model and parts.teacher else None,
            prompts=parts.prompts.prompts,
        )
    return checks


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
        parts.algorithm,
        config.algorithm,
        config.trainer,
        temperature=config.rollout.temperature,
        total_updates=config.run.steps * per_step,
    )
