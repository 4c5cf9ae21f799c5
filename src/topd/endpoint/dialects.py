"""How servers are asked for the log-probs of given tokens, and how their answers are read and checked.

A dialect turns groups (a prompt and its completions, as token ids) into one request, and its response into one number per
completion token, in the order asked. Every token is looked up by its id; numbers that are missing, None, NaN, infinite, above 0
or of another token raise BadAnswer. Nothing is ever sent as text.
"""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import httpx2
import torch
from safetensors.torch import load as load_safetensors

from topd.endpoint.faults import BadAnswer
from topd.endpoint.replica import Request
from topd.models.logprobs import SLACK, TokenGroup

LOWEST = -9000.0
"""vLLM writes -9999 for minus infinity, which JSON does not have. No softmax in float32 gives a sampled token so little."""


@runtime_checkable
class Dialect(Protocol):
    """One way of asking."""

    name: str
    honours_temperature: bool
    """Whether log-probs come at the temperature asked for. If not, they are those at 1."""
    engine_kind: str
    """What computes the log-probs, as `Engine.kind`."""
    spare_tokens: int
    """Tokens of the server's context that prompt and completion must leave free."""

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request: ...

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        """Flat, group by group, completion by completion. Not yet checked to be numbers."""
        ...


def read_scores(dialect: Dialect, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[float]:
    """The checked log-probs of a response, flat. Raises BadAnswer."""
    try:
        found = dialect.decode(response, groups)
    except BadAnswer:
        raise
    except Exception as error:  # foreign bytes can fail anywhere in json, safetensors and numpy, in any way
        said = reprlib.repr(str(error))
        raise BadAnswer(f"{response.url.host}: an answer that cannot be read ({type(error).__name__}: {said})") from None
    wanted = sum(len(completion) for group in groups for completion in group.completions)
    if len(found) != wanted:
        raise BadAnswer(f"{response.url.host}: {len(found)} log-probs for {wanted} tokens")
    for value in found:
        if not is_logprob(value):
            raise BadAnswer(f"{response.url.host}: {reprlib.repr(value)} is no log-prob of a sampled token")
    return [float(value) for value in found]


def is_logprob(value: Any) -> bool:
    """Whether a value can be the log-prob of a token that was sampled. NaN is on no side of any bound."""
    return type(value) in (float, int) and LOWEST < value <= SLACK


class TopdScore:
    """`topd serve`: groups in, float32 out as safetensors. The prompt is run once per group; completion positions only."""

    name = "topd /v1/score"
    honours_temperature = True
    engine_kind = "embedded"
    spare_tokens = 0

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        asked = [{"prompt": list(g.prompt_ids), "completions": [list(c) for c in g.completions]} for g in groups]
        body = {"model": model, "groups": asked, "temperature": temperature}
        return Request(path="/v1/score", json=body, num_tokens=sum(len(c) for g in groups for c in g.completions))

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        tensors = load_safetensors(response.content)
        asked = [token for group in groups for completion in group.completions for token in completion]
        for name, dtype in (("token_ids", torch.int64), ("logprobs", torch.float32)):
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.shape != (len(asked),):  # before any of it becomes Python objects
                raise BadAnswer(f"{response.url.host}: {name} of {tensor.dtype} {[*tensor.shape]} for {len(asked)} tokens")
        if tensors["token_ids"].tolist() != asked:
            raise BadAnswer(f"{response.url.host}: scores of other tokens than were asked for")
        return list(tensors["logprobs"].tolist())


class _Rows:
    """Dialects that know rows only: every completion is sent with its prompt in front of it."""

    honours_temperature = False
    engine_kind = "vllm"
    spare_tokens = 1  # vLLM and SGLang always make room for a token to sample

    @staticmethod
    def rows(groups: Sequence[TokenGroup]) -> Iterator[tuple[tuple[int, ...], int]]:
        """(prompt + completion, tokens of the prompt) of every completion."""
        for group in groups:
            for completion in group.completions:
                yield (*group.prompt_ids, *completion), len(group.prompt_ids)


class VllmPromptLogprobs(_Rows):
    """vLLM's `/v1/completions` with `prompt_logprobs`: for every position a mapping with the actual token among its keys."""

    name = "vLLM /v1/completions with prompt_logprobs"

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        prompts = [list(row) for row, _ in self.rows(groups)]
        body = {"model": model, "prompt": prompts, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
        return Request(path="/v1/completions", json=body, num_tokens=sum(map(len, prompts)))

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        found: list[Any] = []
        for (row, start), choice in zip(self.rows(groups), _choices(response), strict=True):
            positions = choice["prompt_logprobs"]
            if len(positions) != len(row):
                raise BadAnswer(f"{response.url.host}: {len(positions)} positions for {len(row)} tokens")
            found += [entry[str(token)]["logprob"] for token, entry in zip(row[start:], positions[start:], strict=True)]
        return found


class VllmEcho(_Rows):
    """`/v1/completions` with `echo`: the prompt comes back as tokens, here written as ids, with their log-probs."""

    name = "OpenAI /v1/completions with echo"
    engine_kind = "other"

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        prompts = [list(row) for row, _ in self.rows(groups)]
        asked = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": prompts, "temperature": 1.0, **asked}
        return Request(path="/v1/completions", json=body, num_tokens=sum(map(len, prompts)))

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        found: list[Any] = []
        for (row, start), choice in zip(self.rows(groups), _choices(response), strict=True):
            logprobs = choice["logprobs"]
            if logprobs["tokens"] != [f"token_id:{token}" for token in row]:
                raise BadAnswer(f"{response.url.host}: other tokens came back than were sent")
            found += logprobs["token_logprobs"][start:]
        return found


class Sglang(_Rows):
    """SGLang's `/generate`: from `logprob_start_len` on, [log-prob, id, text] per token; the first has no log-prob."""

    name = "SGLang /generate with logprob_start_len"
    engine_kind = "sglang"

    def encode(self, groups: Sequence[TokenGroup], *, model: str, temperature: float) -> Request:
        rows = list(self.rows(groups))
        body = {
            "input_ids": [list(row) for row, _ in rows],
            "logprob_start_len": [start - 1 for _, start in rows],
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }
        return Request(path="/generate", json=body, num_tokens=sum(len(row) for row, _ in rows))

    def decode(self, response: httpx2.Response, groups: Sequence[TokenGroup]) -> list[Any]:
        found: list[Any] = []
        for (row, start), answer in zip(self.rows(groups), response.json(), strict=True):
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != list(row[start:]):
                raise BadAnswer(f"{response.url.host}: scores of other tokens than were asked for")
            found += [entry[0] for entry in entries]
        return found


DIALECTS: tuple[Dialect, ...] = (TopdScore(), Sglang(), VllmPromptLogprobs(), VllmEcho())
"""In the order in which a server is tried: the ones that ask for completion positions alone come first."""


def _choices(response: httpx2.Response) -> list[Any]:
    """The choices of an OpenAI answer, in the order of its prompts."""
    choices = response.json()["choices"]
    if sorted(choice["index"] for choice in choices) != list(range(len(choices))):
        raise BadAnswer(f"{response.url.host}: choices are missing or given twice")
    return sorted(choices, key=lambda choice: choice["index"])
