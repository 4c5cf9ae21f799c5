"""What clients send, and what an error looks like: the forms of vLLM's server. Whatever would be ignored is refused."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

IGNORED = ("user", "metadata", "request_id", "session_id", "cache_salt")
"""Parameters that cannot change an answer."""

MAX_LOGPROBS = 20
MAX_CHOICES = 4096
"""Prompts times `n` of one request."""

MAX_TEXT = 1 << 19
"""UTF-8 bytes of a text, or ids, that are tokenized or spelled at once: a tokenizer takes some hundred bytes for each."""

MAX_STOPS = 1024
"""Stop strings, characters of one, and stop tokens."""

MAX_KEY = 100
"""Characters of a key that are repeated in an error."""

MAX_MESSAGE = 600
"""Characters of an error; what a client sent is repeated in many."""

MIN_TEMPERATURE = 0.01
"""Below it logits overflow; 0 is greedy."""

_TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class ApiError(Exception):
    """An answer that is an error. `param` is the parameter at fault; `retry_after` is in seconds."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ...")
        self.status = status
        self.param = None if param is None else param[:MAX_MESSAGE]
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error as OpenAI shapes it."""
        kind = ERROR_TYPES.get(self.status, "Error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError for what is none, and for NaN, infinity and a key that is given twice."""
    try:
        data = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(data).__name__}")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        for key, _ in pairs:
            if key not in data:
                raise ValueError(f"the key {key[:MAX_KEY]} is given twice")
            del data[key]
    return data


class ApiRequest(BaseModel):
    """A parameter that is null counts as absent. One that is not listed must have a value that changes nothing."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values of unsupported parameters that mean the same as leaving them out."""

    model: str | None = None

    def neutral(self, key: str) -> tuple[Any, ...]:
        return self.NEUTRAL.get(key, ())


class CompletionRequest(ApiRequest):
    """POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "suffix": ("",),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "min_p": (0,),
        "top_k": (-1, 0),
        "use_beam_search": (False,),
        "ignore_eos": (False,),
        "min_tokens": (0,),
        "include_stop_str_in_output": (False,),
        "spaces_between_special_tokens": (True,),
        "bad_words": ([],),
        "priority": (0,),
    }

    prompt: Any = None
    """str, [str], [ids] or [[ids]]; work.py reads it."""
    max_tokens: int = Field(16, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=MAX_STOPS)] = []
    echo: bool = False
    logprobs: _TopLogprobs | None = None
    prompt_logprobs: _TopLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def neutral(self, key: str) -> tuple[Any, ...]:
        return (self.n,) if key == "best_of" else super().neutral(key)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)


class ScoreGroup(BaseModel):
    """A prompt and its completions, as token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Any
    completions: list[Any] = Field(min_length=1, max_length=MAX_CHOICES)


class ScoreRequest(ApiRequest):
    """POST /v1/score."""

    groups: Annotated[list[ScoreGroup], FailFast(), Field(min_length=1, max_length=MAX_CHOICES)]
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE)


class TokenizeRequest(ApiRequest):
    """POST /tokenize."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(ApiRequest):
    """POST /detokenize."""

    tokens: list[Any] = Field(max_length=MAX_TEXT)
    skip_special_tokens: bool = False


R = TypeVar("R", bound=ApiRequest)


def read(kind: type[R], data: Mapping[str, Any]) -> R:
    """The request in a JSON object. Raises ApiError naming the first parameter that cannot be used."""
    try:
        request = kind.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{where}: {first['msg']}", param=where.partition(".")[0]) from error
    for key, value in (request.model_extra or {}).items():
        if key not in IGNORED and value not in request.neutral(key):
            raise ApiError(400, f"{key} is not supported by this server; leave it out", param=key)
    return request
