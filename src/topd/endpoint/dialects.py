"""Dialects: requests for the log-probs of given tokens in each server's API, and checked readers of the answers.

Every token is looked up by its id; numbers that are missing, None, NaN, infinite, above 0 or of another token raise BadAnswer.
Prompts and completions are never sent as text.
"""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import httpx2
import torch
from safetensors.torch import load as load_safetensors

from topd.endpoint.faults import BadAnswer
from topd.endpoint.replica import Request
from topd.models.logprobs import SLACK, TokenGroup

LOWEST = -9000.0
"""vLLM writes -9999 for minus infinity, which JSON lacks. No float32 softmax gives a sampled token a log-prob this low."""


OTHER_TOKENS = "the scores are of other tokens than those sent"


@runtime_checkable
class Dialect(Protocol):
    """One form of request and answer."""

    name: str
    honours_temperature: bool
    """True if log-probs are returned at the requested temperature, False if always at temperature 1."""
    engine_kind: str
    """Backend that computes the log-probs, as in `Engine.kind`."""
    spare_tokens: int
    """Tokens of the server's context that prompt and completion must leave free."""

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request: ...

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        """Values in flat order, group by group, completion by completion, not yet checked to be numbers."""


def read_scores(dialect: Dialect, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[float]:
    """Checked log-probs of a response, flat. Raises BadAnswer."""
    try:
        logprobs = dialect.decode(response, groups)
        expected = len(_tokens(groups))
        if len(logprobs) != expected:
            raise BadAnswer(f"{len(logprobs)} log-probs for {expected} tokens")
        for value in logprobs:
            if not is_logprob(value):
                raise BadAnswer(f"{reprlib.repr(value)} cannot be the log-prob of a sampled token")
        return [float(value) for value in logprobs]
    except BadAnswer as fault:
        raise BadAnswer(f"{response.url.host}: {fault}") from None
    except Exception as error:  # foreign bytes can fail anywhere in json, safetensors and numpy, in any way
        reason = f"{type(error).__name__}: {reprlib.repr(str(error))}"
        raise BadAnswer(f"{response.url.host}: unreadable answer ({reason})") from None


def is_logprob(value: Any) -> bool:
    """True if a value can be the log-prob of a sampled token. NaN fails every comparison."""
    return type(value) in (float, int) and LOWEST < value <= SLACK


def _tokens(groups: Sequence[TokenGroup]) -> list[int]:
    return [token for group in groups for completion in group.completions for token in completion]


class TopdScore:
    """`topd serve`: groups in, float32 safetensors out, for completion positions only. The prompt runs once per group."""

    name = "topd /v1/score"
    honours_temperature = True
    engine_kind = "embedded"
    spare_tokens = 0

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        lists = [{"prompt": list(g.prompt_ids), "completions": [list(c) for c in g.completions]} for g in groups]
        body = {"model": model, "groups": lists, "temperature": temperature}
        return Request(path="/v1/score", json=body, num_tokens=len(_tokens(groups)))

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        tensors = load_safetensors(response.content)
        expected = _tokens(groups)
        for name, dtype in (("token_ids", torch.int64), ("logprobs", torch.float32)):
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.shape != (len(expected),):  # before any of it becomes Python objects
                raise BadAnswer(f"{name} of {tensor.dtype} {[*tensor.shape]} for {len(expected)} tokens")
        if tensors["token_ids"].tolist() != expected:
            raise BadAnswer(OTHER_TOKENS)
        return list(tensors["logprobs"].tolist())


class _Rows(ABC):
    """Base of dialects without groups: every completion is sent as one row, after its prompt."""

    honours_temperature = False
    engine_kind = "vllm"
    spare_tokens = 1  # vLLM and SGLang always reserve room for one sampled token
    settings: Mapping[str, Any] = {}
    """Rest of a request to OpenAI's `/v1/completions`."""

    @staticmethod
    def rows(groups: Sequence[TokenGroup]) -> Iterator[tuple[list[int], int]]:
        """(prompt + completion, tokens of the prompt) of every completion."""
        for group in groups:
            for completion in group.completions:
                yield [*group.prompt_ids, *completion], len(group.prompt_ids)

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        answers = zip(self.rows(groups), self.answers(response), strict=True)
        return [value for (row, start), answer in answers for value in self.read(answer, row, start)]

    def answers(self, response: httpx2.Response) -> list[Any]:
        """Choices of an OpenAI answer, in the order of its prompts."""
        choices = response.json()["choices"]
        if sorted(choice["index"] for choice in choices) != list(range(len(choices))):
            raise BadAnswer("choices are missing or given twice")
        return sorted(choices, key=lambda choice: choice["index"])

    @abstractmethod
    def read(self, answer: Any, row: list[int], start: int) -> list[Any]:
        """Log-probs of `row[start:]` in its answer."""

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        prompts = [row for row, _ in self.rows(groups)]
        body = {"model": model, "prompt": prompts, "temperature": 1.0, **self.settings}
        return Request(path="/v1/completions", json=body, num_tokens=sum(map(len, prompts)))


class VllmPromptLogprobs(_Rows):
    """vLLM's `/v1/completions` with `prompt_logprobs`: a mapping per position, with the actual token among its keys."""

    name = "vLLM /v1/completions with prompt_logprobs"
    settings: Mapping[str, Any] = {"prompt_logprobs": 0, "max_tokens": 1}

    def read(self, answer: Any, row: list[int], start: int) -> list[Any]:
        positions = answer["prompt_logprobs"]
        if len(positions) != len(row):
            raise BadAnswer(f"{len(positions)} positions for {len(row)} tokens")
        return [entry[str(token)]["logprob"] for token, entry in zip(row[start:], positions[start:], strict=True)]


class VllmEcho(_Rows):
    """`/v1/completions` with `echo`: the server returns the prompt's tokens, as ids, with their log-probs."""

    name = "OpenAI /v1/completions with echo"
    engine_kind = "other"
    settings: Mapping[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_tokens_as_token_ids": True}

    def read(self, answer: Any, row: list[int], start: int) -> list[Any]:
        if answer["logprobs"]["tokens"] != [f"token_id:{token}" for token in row]:
            raise BadAnswer(OTHER_TOKENS)
        return answer["logprobs"]["token_logprobs"][start:]


class Sglang(_Rows):
    """SGLang's `/generate`: [log-prob, id, text] per token from `logprob_start_len` on; the first has no log-prob."""

    name = "SGLang /generate with logprob_start_len"
    engine_kind = "sglang"

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        rows = list(self.rows(groups))
        body = {
            "input_ids": [row for row, _ in rows],
            "logprob_start_len": [start - 1 for _, start in rows],
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        return Request(path="/generate", json=body, num_tokens=sum(len(row) for row, _ in rows))

    def answers(self, response: httpx2.Response) -> list[Any]:
        return response.json()

    def read(self, answer: Any, row: list[int], start: int) -> list[Any]:
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        if [entry[1] for entry in entries] != row[start:]:
            raise BadAnswer(OTHER_TOKENS)
        return [entry[0] for entry in entries]


DIALECTS: tuple[Dialect, ...] = (TopdScore(), Sglang(), VllmPromptLogprobs(), VllmEcho())
"""In the order in which they are tried: those that request completion positions only come first."""
