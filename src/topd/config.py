"""The whole configuration: sections, defaults, rules. Precedence: defaults < file < command line.

Sections are strict: unknown keys, wrong types and values out of range are errors. Rules that span sections are in
config_rules.py; config_file.py reads files, and finds the class of `[algorithm]`, which its own module declares.
"""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, field_validator, model_validator

from topd.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Strict, frozen, closed: no coercion, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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


def server_root(url: str) -> str:
    """URL of a server without /v1, equal for both spellings."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class EndpointConfig(Section):
    """Settings of any served model; refused without `base_url`."""

    base_url: list[str] | None = Field(None, min_length=1, description="URLs of servers of one model, as http://host:8000/v1.")
    max_concurrent_requests: int = Field(16, ge=1, description="Requests in flight per server.")
    wait_s: float = Field(0.0, ge=0, description="Seconds to wait at the start for servers that cannot be reached yet.")
    timeout_s: float = Field(300.0, gt=0, description="Seconds that one attempt of a request may take.")
    patience_s: float = Field(600.0, gt=0, description="Seconds without any success before a request is given up.")
    max_attempts: int = Field(6, ge=1, description="Failures of one request before it is given up.")

    @field_validator("base_url", mode="before")
    @classmethod
    def _hold_no_secret(cls, value: Any) -> Any:
        """Before any other rule is checked, as its message may show the value."""
        urls = value if isinstance(value, list) else [value]
        if any(mark in str(url) for url in urls for mark in "@?#"):
            raise ConfigError(
                "base_url must hold no user, password, query or fragment; found one. Keys are read from an environment "
                "variable only (api_key_env)."
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _are_plain_urls(cls, value: list[str] | None) -> list[str] | None:
        for url in value or []:
            try:
                parts = urlsplit(url)
                fits = (
                    parts.scheme in ("http", "https")
                    and bool(parts.hostname)
                    and (parts.port or 1) > 0
                    and re.fullmatch(r"[!-~]+", url) is not None
                )
            except ValueError:
                fits = False
            if not fits:
                raise ConfigError(
                    "base_url must hold http or https URLs with a port from 1 to 65535 and no spaces, as "
                    f"http://127.0.0.1:8000/v1; found {url!r}."
                )
        if value is not None and len(set(map(server_root, value))) < len(value):
            raise ConfigError(f"base_url names a server twice; found {value!r}. Remove one.")
        return value


def _environment_name(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):  # it may be the key itself: never shown
        raise ConfigError(
            "api_key_env must be the NAME of an environment variable (capitals, digits, _), never the key itself. "
            "Export the key, and give the variable's name."
        )
    return value


EnvironmentName = Annotated[str, BeforeValidator(_environment_name)]


class TeacherConfig(EndpointConfig):
    name: str = Field(min_length=1, description="As student.name; with base_url, the name under which the servers serve it.")
    dtype: Dtype = Field(
        "float32", description="Precision of scoring. With base_url: in which the servers compute, which they do not tell."
    )
    map_eos: bool = Field(False, description="Score the student's end token as the teacher's end token, where they differ.")
    domains: list[str] | None = Field(
        None, min_length=1, description="Domains of prompts it answers for, in [teachers.NAME]. Unset: the domain called NAME."
    )
    tokenizer: str | None = Field(
        None, description="Folder or hub id with the tokenizer of a served teacher, where its servers cannot prove theirs."
    )
    api_key_env: EnvironmentName = Field("TOPD_TEACHER_API_KEY", description="Environment variable that holds the servers' key.")
    max_dropped_share: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of a step's groups that may go unscored and be dropped. More stop the run.",
    )


class TaskBase(Section):
    template: Literal["auto", "chat", "plain"] = Field(
        "auto", description="chat: the tokenizer's chat template; plain: the text as it is; auto: chat where there is a template."
    )
    system_prompt: str | None = Field(None, description="System message of rows without their own; needs a chat template.")
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, for example { enable_thinking = false }."
    )
    prompt_suffix: str = Field("", description="Text appended to every question, for example the wanted answer format.")
    answer_pattern: str | None = Field(
        None,
        description="Regular expression with one group; its last match is the answer. `.` ends at the line, (?s) changes that. "
        "Unset: the last \\boxed{}, or what docs/data.md says.",
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="Drop longer prompts. Unset: a prompt too long is an error.")

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, value: str | None) -> str | None:
        try:
            groups = 1 if value is None else re.compile(value).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"task.answer_pattern is not a regular expression: {error}; found {value!r}.") from None
        if groups != 1:
            raise ConfigError(f"task.answer_pattern must have exactly one group, the answer; found {value!r} with {groups}.")
        if value is not None and re.match(r"\\\\(?:boxed|fbox)", value):
            raise ConfigError(
                f"task.answer_pattern = {value!r}: no pattern counts braces, so that of an unclosed box an earlier one would be "
                "graded. Leave it unset: then the last \\boxed{} is the answer."
            )
        return value


class ReasoningGymConfig(TaskBase):
    type: Literal["reasoning_gym"]
    generator: str = Field(description="Name of a reasoning-gym generator, for example chain_sum.")
    params: dict[str, Any] = Field(default_factory=dict, description="Arguments of the generator.")
    train_size: int = Field(10_000, ge=1, description="Training problems.")
    eval_size: int = Field(200, ge=1, description="Held-out problems; their seeds are disjoint from the training seeds.")


class JsonlConfig(TaskBase):
    type: Literal["jsonl"]
    path: str = Field(
        description="Training file: one JSON object a line with prompt, answer and so on; docs/data.md lists the forms."
    )
    eval_path: str | None = Field(None, description="Held-out file of the same form.")
    grader: Literal["math_verify", "exact"] = Field("math_verify", description="How an answer is compared with the right one.")


class HubConfig(TaskBase):
    type: Literal["hub"]
    name: str = Field(description="Data set id or local folder, as `datasets.load_dataset` takes it.")
    subset: str | None = Field(None, description="Configuration of the data set.")
    split: str = Field("train", description="Split to train on.")
    eval_split: str | None = Field(None, description="Held-out split.")
    prompt_column: str | None = Field(
        None, description="Column with the question, a text or a list of messages. Unset: prompt, messages, problem or question."
    )
    answer_column: str | None = Field(
        None, description="Column with the answer. Unset: answer, reward_model or the box in solution, where there is one."
    )
    demonstration_column: str | None = Field(
        None, description="Column with a worked completion. Unset: demonstration, completion or solution, where there is one."
    )
    domain_column: str | None = Field(None, description="Column with the domain. Unset: domain, where there is one.")
    system_prompt_column: str | None = Field(
        None, description="Column with a system message by row. Unset: system_prompt, where there is one."
    )
    grader: Literal["math_verify", "exact"] = Field("math_verify", description="How an answer is compared with the right one.")


TaskConfig = Annotated[ReasoningGymConfig | JsonlConfig | HubConfig, Field(discriminator="type")]


class RolloutConfig(EndpointConfig):
    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="Where completions are sampled: embedded, in this process; vllm, by the servers at base_url."
    )
    prompts_per_step: int = Field(512, ge=1, description="Prompts in a rollout batch.")
    group_size: int = Field(8, ge=1, description="Completions per prompt.")
    max_completion_tokens: int = Field(16_384, ge=1, description="Longer completions are cut off (finish reason: length).")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; student, teacher and ratio all use it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling. Log-probs stay those of the full distribution.")
    max_concurrent_rollouts: int = Field(64, ge=1, description="Completions decoded at the same time by the embedded engine.")
    max_lag: int = Field(
        0, ge=0, description="Steps that sampling may be ahead of training, and its weights behind. 1: sample while training."
    )
    max_mismatch_kl: float = Field(
        0.1,
        gt=0,
        description="With max_lag > 1: nats per token by which the policy may have moved away from the weights that sampled a "
        "group. A group beyond is dropped.",
    )
    weights: Literal["files", "nccl"] = Field(
        "files", description="How servers get new weights: a safetensors folder that they can read, or vLLM's NCCL transfer."
    )
    weights_directory: str | None = Field(
        None,
        description="Folder with the same path here and on the servers, for handover/ with new weights. Unset: the run folder.",
    )
    model: str | None = Field(None, description="Name under which the servers serve the student. Unset: the only one they list.")
    api_key_env: EnvironmentName = Field("TOPD_ROLLOUT_API_KEY", description="Environment variable that holds the servers' key.")


class AlgorithmConfig(Section):
    """Base of every algorithm's `Config`; the subclass narrows `type` to its own name."""

    type: str

    @property
    def min_group_size(self) -> int:
        """Fewest completions per prompt with which the algorithm learns anything."""
        return 1

    def floor(self) -> tuple[float, str] | None:
        """Lowest token reward that credit can give, and its formula in words; None without one."""
        return None

    def units(self) -> dict[str, str]:
        """Units of `token_reward`, `return` and `advantage`."""
        return dict.fromkeys(("token_reward", "return", "advantage"), "nats")

    def unread(self) -> dict[str, str]:
        """Keys that these settings ignore -> the setting that makes it so."""
        return {}

    def advice(self) -> dict[str, str]:
        """Metric -> what this algorithm's own keys can do where it is unhealthy."""
        return {}

    def describe(self) -> dict[str, Any]:
        """The content of credit.json, by which a run folder is read without this class."""
        return {"floor": self.floor(), "units": self.units(), "unread": self.unread(), "advice": self.advice()}

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        """Refuse an ignored key, unless it has its default."""
        for key, reason in self.unread().items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"algorithm.{key} = {getattr(self, key)} would be ignored with {reason}. Remove it.")
        return self

    @property
    def teacher_top_k(self) -> int:
        """k of the streams with k entries per token that the algorithm asks a teacher for."""
        return 0

    def judge_noise(self, largest: float) -> tuple[bool, str]:
        """Effect of log-ratios from rounding alone: True if they do harm, and the end of a sentence about it.

        `largest`: their largest root mean square in a group (nats).
        """
        words = f', and algorithm.type = "{self.type}" learns from it. Set float32 for teacher and trainer, or algorithm.type = '
        return False, words + '"topd", which ignores noise below algorithm.rounding.'

    def in_precision(self, dtype: Dtype) -> "AlgorithmConfig":
        """The same, with what was left unset and depends on the precision of log-ratios. `dtype`: the lowest that enters them."""
        return self


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
    task: TaskConfig = Field(description="A task; its held-out problems are used.")


class EvalConfig(Section):
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
    teacher: TeacherConfig | None = None
    teachers: dict[TeacherName, TeacherConfig] = Field({}, description="Several teachers, [teachers.NAME], by domain.")
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
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
        if self.rollout.engine == "vllm":  # with a teacher on vLLM the servers' own numbers are used
            scored.append(self.student.dtype)
        return "bfloat16" if "bfloat16" in scored else "float32"

    def teachers_by_name(self) -> dict[str, TeacherConfig]:
        """`[teacher]` as "teacher", or the members of `[teachers]`."""
        return {"teacher": self.teacher} if self.teacher else dict(self.teachers)
