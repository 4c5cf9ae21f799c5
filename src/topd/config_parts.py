"""Base classes of the sections whose keys are declared by a module: teacher, task, grader, algorithm (plugins.py)."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_serializer,
    model_validator,
)

from topd.errors import ConfigError
from topd.plugins import ALGORITHM, GRADER, TASK, TEACHER, Kind

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Strict, frozen, closed: no coercion, no unknown keys."""

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset()
    """Keys that a resumed run may set to another value."""
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Plugged(Section):
    """Base of the `Config` of a module that can be plugged in.

    A class that sets KIND stands for all modules of that kind: a table is validated by the `Config` of the module that its `type`
    names.
    """

    KIND: ClassVar[Kind]
    type: str

    @classmethod
    def module_of(cls, table: Mapping[str, Any]) -> Any:
        """The name or import path that a table gives."""
        return table.get("type")

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_module(cls, value: Any, handler: Callable[[Any], Any]) -> Self:
        if "KIND" not in vars(cls) or isinstance(value, cls):
            return handler(value)
        name = cls.module_of(value) if isinstance(value, Mapping) else None
        if name is None:
            raise ConfigError(f"{cls.KIND.key} is required: one of {', '.join(cls.KIND.available)}, or an import path.")
        own = cls.KIND.load(name).Config
        if not (isinstance(own, type) and issubclass(own, cls)):
            raise ConfigError(f'{cls.KIND.key} = "{name}": its Config must be a subclass of topd.config.{cls.__name__}.')
        return own.model_validate({**value, "type": name})


def server_root(url: str) -> str:
    """URL of a server without /v1, equal for both spellings."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _environment_name(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):  # it may be the key itself: never shown
        raise ConfigError(
            "api_key_env must be the NAME of an environment variable (capitals, digits, _), never the key itself. "
            "Export the key, and give the variable's name."
        )
    return value


EnvironmentName = Annotated[str, BeforeValidator(_environment_name)]


class EndpointConfig(Section):
    """Keys of any section that leads to servers. MAY_CHANGE: where they are and how they are asked."""

    NAME_KEY: ClassVar[str] = "name"
    """The key of the section with the name under which the servers serve their model."""
    MAY_CHANGE = frozenset(
        {"base_url", "api_key_env", "max_concurrent_requests", "wait_s", "timeout_s", "patience_s", "max_attempts"}
    )
    base_url: list[str] = Field(min_length=1, description="URLs of servers of one model, as http://host:8000/v1.")
    api_key_env: EnvironmentName = Field(description="Environment variable that holds the servers' key.")
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
    def _are_plain_urls(cls, value: list[str]) -> list[str]:
        for url in value:
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
        if len(set(map(server_root, value))) < len(value):
            raise ConfigError(f"base_url names a server twice; found {value!r}. Remove one.")
        return value

    @property
    def roots(self) -> set[str]:
        """The servers, however their URLs are written."""
        return {server_root(url) for url in self.base_url}


class TeacherConfig(Plugged):
    """Base of every teacher's `Config`."""

    KIND = TEACHER
    MAY_CHANGE = frozenset({"max_dropped_share"})
    type: str = Field("", description="Unset: served with base_url, else local.")
    name: str = Field(min_length=1, description="As student.name; with base_url, the name under which the servers serve it.")
    dtype: Dtype = Field(
        "float32", description="Precision of scoring. With base_url: in which the servers compute, which they do not tell."
    )
    domains: list[str] | None = Field(
        None, min_length=1, description="Domains of prompts it answers for, in [teachers.NAME]. Unset: the domain called NAME."
    )

    max_dropped_share: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of a step's groups that may go unscored and be dropped. More stop the run.",
    )

    @classmethod
    def module_of(cls, table: Mapping[str, Any]) -> Any:
        return table.get("type") or ("local" if table.get("base_url") is None else "served")


MapEos = Annotated[bool, Field(description="Score the student's end token as the teacher's end token, where they differ.")]


class GraderConfig(Plugged):
    """Base of every grader's `Config`. One without further keys is written as a bare name: `grader = "exact"`."""

    KIND = GRADER

    @model_serializer(mode="wrap")
    def _short(self, handler: Callable[[Any], Any]) -> Any:
        table = handler(self)
        return self.type if table == {"type": self.type} else table


class TaskConfig(Plugged):
    """Base of every task's `Config`."""

    KIND = TASK
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


def _as_table(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class GradedTaskConfig(TaskConfig):
    """Base for tasks whose answers are compared by a grader that the user chooses."""

    grader: Annotated[SerializeAsAny[GraderConfig], BeforeValidator(_as_table)] = Field(
        default_factory=lambda: GraderConfig.model_validate({"type": "math_verify"}),
        description="Comparison of an answer with the right one: math_verify, exact, or an import path. A grader that has keys "
        "takes a table with `type`.",
    )


class AlgorithmConfig(Plugged):
    """Base of every algorithm's `Config`."""

    KIND = ALGORITHM

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
