"""The whole configuration: sections, defaults, rules. Precedence: defaults < file < command line.

Sections are strict: unknown keys, wrong types and values out of range are errors. Rules that span sections are in
config_rules.py; config_file.py reads files. A part that can be plugged in has its keys in the `Config` of its module.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_serializer, model_validator
from pydantic_core import InitErrorDetails

from topd.config_parts import (
    AlgorithmConfig,
    Dtype,
    EndpointConfig,
    EnvironmentName,
    GradedTaskConfig,
    GraderConfig,
    MapEos,
    Plugged,
    Section,
    TaskConfig,
    TeacherConfig,
)
from topd.errors import ConfigError
from topd.plugins import ENGINE, Kind, is_path

__all__ = [
    "AlgorithmConfig",
    "Config",
    "Dtype",
    "EndpointConfig",
    "EngineConfig",
    "EnvironmentName",
    "GradedTaskConfig",
    "GraderConfig",
    "MapEos",
    "Section",
    "TaskConfig",
    "TeacherConfig",
]


class LoraConfig(Section):
    rank: int = Field(16, ge=1, le=1024, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="Scale: adapters are multiplied by alpha / rank.")
    use_rslora: bool = Field(False, description="Multiply by alpha / sqrt(rank) instead, as rank-stabilised LoRA does.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Modules that get an adapter, as peft names them. A tied embedding or output head is untied."
    )
    modules_to_save: list[str] = Field([], description="Modules that are trained in full beside the adapters, by their names.")


class StudentConfig(Section):
    name: str = Field(description="Model folder, hub id, .gguf file, gguf:PACKAGE (inside a Python package) or builtin:NAME.")
    dtype: Dtype = Field(
        "float32", description="Precision of sampling. Anything but float32 makes the trainer recompute log-probs."
    )
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of all weights.")


class EngineConfig(Section):
    """Base of every engine's `Config`: the section [rollout.NAME], or [rollout.options] of an engine with an import path."""

    KIND: ClassVar[Kind] = ENGINE
    OWN_NUMBERS: ClassVar[bool] = False
    """True if the log-probs that the engine reports may enter the reward (collect/score.py)."""

    def rules(self, config: "Config") -> Iterator[str]:
        """One paragraph for each setting of the configuration that cannot work with this engine, or would be ignored."""
        if config.rollout.max_lag:
            yield (
                f'rollout.max_lag would be ignored: rollout.engine = "{config.rollout.engine}" does not sample while the trainer '
                "works. Remove it."
            )


class RolloutConfig(Section):
    engine: str = Field(
        "embedded",
        description="Place where completions are sampled: embedded (in this process), vllm (by servers), or an import path; that "
        "engine's keys are in [rollout.options].",
    )
    prompts_per_step: int = Field(512, ge=1, description="Prompts in a rollout batch.")
    group_size: int = Field(8, ge=1, description="Completions per prompt.")
    max_completion_tokens: int = Field(16_384, ge=1, description="Longer completions are cut off (finish reason: length).")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; student, teacher and ratio all use it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling. Log-probs stay those of the full distribution.")
    max_concurrent_rollouts: int = Field(64, ge=1, description="Completions decoded at the same time in this process.")
    max_lag: int = Field(
        0, ge=0, description="Steps that sampling may be ahead of training, and its weights behind. 1: sample while training."
    )
    max_mismatch_kl: float = Field(
        0.1,
        gt=0,
        description="With max_lag > 1: nats per token by which the policy may have moved away from the weights that sampled a "
        "group. A group beyond is dropped.",
    )
    options: SerializeAsAny[EngineConfig] = Field(description="The engine's own section.")

    @property
    def own_section(self) -> str:
        """The name of the engine's section in the table [rollout]."""
        return _engine_section(self.engine)

    @model_validator(mode="before")
    @classmethod
    def _of_its_engine(cls, table: Any) -> Any:
        if not isinstance(table, Mapping) or isinstance(table.get("options"), EngineConfig):
            return table
        name = table.get("engine", "embedded")
        engine, own = ENGINE.load(name), _engine_section(name)
        if ignored := [key for key, value in table.items() if isinstance(value, Mapping) and key != own]:
            raise ConfigError(
                f'[rollout.{ignored[0]}] would be ignored: rollout.engine = "{name}" reads [rollout.{own}]. Remove the section, '
                "or set rollout.engine."
            )
        try:
            options = engine.Config.model_validate(table.get(own, {}))
        except ValidationError as error:
            raise _inside(own, error) from None
        return {**{key: value for key, value in table.items() if key != own}, "options": options}

    @model_serializer(mode="wrap")
    def _as_tables(self, handler: Callable[[Any], Any]) -> dict[str, Any]:
        table: dict[str, Any] = handler(self)
        own = table.pop("options", None)
        return table | ({self.own_section: own} if own else {})


def _engine_section(engine: str) -> str:
    return "options" if is_path(engine) else engine


def _inside(key: str, error: ValidationError) -> ValidationError:
    """The same problems, found in the value of a key."""
    lines = [
        InitErrorDetails(type=line["type"], loc=(key, *line["loc"]), input=line["input"], ctx=line.get("ctx", {}))
        for line in error.errors()
    ]
    return ValidationError.from_exception_data(error.title, lines)


class TrainerConfig(Section):
    minibatch_prompts: int = Field(32, ge=1, description="Prompts per optimizer update; must divide rollout.prompts_per_step.")
    epochs: int = Field(1, ge=1, description="Passes over each rollout batch.")
    learning_rate: float = Field(1e-6, gt=0, le=1e30, description="Peak learning rate of AdamW.")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="AdamW's decay rates."
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay (matrices only).")
    warmup_updates: int = Field(0, ge=0, description="Updates of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after warm-up, to the end of the run."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    dtype: Dtype = Field("float32", description="Precision of the forward pass; weights and log-probs stay float32.")
    gradient_checkpointing: bool = Field(False, description="Recompute layers in the backward pass: less memory, more time.")
    max_tokens_per_microbatch: int = Field(
        16_384, ge=1, description="Padded prompt and completion tokens in one forward pass. Changes memory, not results."
    )


class BenchmarkConfig(Section):
    name: str = Field(min_length=1, description="Name in evals.jsonl and in tables.")
    task: SerializeAsAny[TaskConfig] = Field(description="A task; its held-out problems are used.")


class EvalConfig(Section):
    MAY_CHANGE = frozenset({"teacher"})
    benchmarks: list[BenchmarkConfig] = Field([], description="Benchmarks. Empty: the task's held-out problems, as `held_out`.")
    samples_per_problem: int = Field(16, ge=1, description="k of avg@k.")
    max_problems: int | None = Field(None, ge=1, description="Use only the first problems of each benchmark.")
    teacher: bool = Field(True, description="Evaluate the teacher too, once, before the first step.")
    every_steps: int = Field(0, ge=0, description="Evaluate after every this many steps. 0: only before and after.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    seed: int = Field(0, ge=0, description="Root of its random numbers: the same for all runs, whatever their run.seed.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Unset: as rollout.max_completion_tokens.")


class RunConfig(Section):
    MAY_CHANGE = frozenset({"resume", "checkpoint_every", "keep_checkpoints", "steps", "device", "directory", "trackers"})
    directory: str = Field(min_length=1, description="Folder of the run, the only place it writes to.")
    steps: int = Field(ge=1, description="Rollout batches.")
    seed: int = Field(0, ge=0, description="Root of all random streams.")
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints kept, newest first.")
    resume: bool = Field(False, description="Go on from the newest complete checkpoint of the folder.")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps.")
    threads: int | None = Field(
        None, ge=1, description="Torch threads. Unset: torch decides. The same number gives the same bytes."
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        [], description="Experiment trackers that get the metrics too: tensorboard, wandb, trackio, mlflow (docs/trackers.md)."
    )

    @field_validator("trackers")
    @classmethod
    def _are_given_once(cls, value: list[str]) -> list[str]:
        if twice := sorted({name for name in value if value.count(name) > 1}):
            raise ConfigError(f"run.trackers must name each tracker once; found {twice[0]!r} twice. Remove one.")
        return value


TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class Config(Section):
    student: StudentConfig
    teacher: SerializeAsAny[TeacherConfig] | None = None
    teachers: dict[TeacherName, SerializeAsAny[TeacherConfig]] = Field(
        {}, description="Several teachers, [teachers.NAME], by domain."
    )
    task: SerializeAsAny[TaskConfig]
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig.model_validate({}))
    algorithm: SerializeAsAny[AlgorithmConfig]
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig

    @property
    def reward_dtype(self) -> Dtype:
        """The lowest precision that enters a log-ratio: the teacher's, and the student's as it is scored.

        What the embedded engine samples in does not: the trainer recomputes log-probs then.
        """
        scored = [self.trainer.dtype, *(teacher.dtype for teacher in self.teachers_by_name().values())]
        if self.rollout.options.OWN_NUMBERS:
            scored.append(self.student.dtype)
        return "bfloat16" if "bfloat16" in scored else "float32"

    def teachers_by_name(self) -> dict[str, TeacherConfig]:
        """`[teacher]` as "teacher", or the members of `[teachers]`."""
        return {"teacher": self.teacher} if self.teacher else dict(self.teachers)

    def served_teachers(self) -> dict[str, EndpointConfig]:
        """The sections of teachers behind URLs, by their dotted names."""
        prefix = "" if self.teacher else "teachers."
        sections: dict[str, Section] = {prefix + name: section for name, section in self.teachers_by_name().items()}
        return {name: section for name, section in sections.items() if isinstance(section, EndpointConfig)}

    def plugins(self) -> list[str]:
        """Import paths of the modules that are not topd's own, each once."""
        named = [section.type for _, section in sections(self) if isinstance(section, Plugged)]
        return sorted({path for path in (*named, self.rollout.engine) if is_path(path)})


def sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """A section and all sections within it, each with what stands before its keys: "rollout.vllm."."""
    yield prefix, section
    for key, value in section:
        name = section.own_section if isinstance(section, RolloutConfig) and isinstance(value, Section) else key
        members = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {"": value}
        for member, inner in members.items():
            if isinstance(inner, Section):
                yield from sections(inner, f"{prefix}{name}.{member}.".replace("..", "."))
