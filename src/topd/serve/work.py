"""A request as work for the model: what is to be scored, and what is to be sampled."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from topd.models.language_model import LanguageModel
from topd.models.logprobs import Tokens
from topd.rollout.engine import SamplingParams
from topd.serve.prefixes import SharedPrefixes, share_prefixes
from topd.serve.protocol import MAX_CHOICES, MAX_STOPS, MAX_TEXT, MIN_TEMPERATURE, ApiError, CompletionRequest, ScoreRequest
from topd.types import Prompt

MAX_ANSWER_BYTES = 250_000_000
"""Memory of an answer while it is made."""

LOGPROB_BYTES, TOKEN_BYTES, ID_BYTES = 560, 80, 16
"""Of a log-prob with its token, a sampled token, and an id of a prompt that is repeated, as Python objects and as JSON."""

MAX_TOKENS = 1 << 22
"""Token ids that may wait (100 to 200 MB of Python integers), and tokens that one request may ask for."""

SCORING_TOKENS, SCORING_ROWS = 4096, 16
"""Tokens and completions that are scored without a pause, at least."""

SAMPLING_ROWS = 32
"""Completions that are sampled together. A prompt with a greater `n` is cut into pieces, each with its own prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Log-probs of completions, at one temperature."""

    groups: tuple[Tokens, ...]
    temperature: float = 1.0
    top_k: int | None = None
    """Most likely tokens wanted beside each; None: no ranks either."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Work of equal kind runs together."""
        return self.temperature, self.top_k is None

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return sum(len(group.prompt_ids) + sum(map(len, group.completions)) for group in self.groups)

    @property
    def num_ids(self) -> int:
        """Token ids in memory while it waits."""
        return self.num_tokens

    @property
    def size(self) -> int:
        """Share of a batch, whose limit is in tokens."""
        return self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Completions of one prompt, at most SAMPLING_ROWS of them."""

    prompt: Prompt
    """Its id is the seed."""
    params: SamplingParams
    top_k: int = 0
    """Most likely tokens wanted beside each sampled one."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Work of equal kind runs together."""
        return self.params, self.top_k > 0

    @property
    def num_tokens(self) -> int:
        """Tokens to run, if no completion ends early."""
        return len(self.prompt.token_ids) + self.params.n * self.params.max_tokens

    @property
    def num_ids(self) -> int:
        """Token ids in memory while it waits."""
        return len(self.prompt.token_ids)

    @property
    def size(self) -> int:
        """Share of a batch, whose limit is in completions."""
        return self.params.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """New weights, from the safetensors of a folder."""

    folder: Path

    kind: ClassVar[None] = None
    num_tokens: ClassVar[int] = 0
    num_ids: ClassVar[int] = 0
    size: ClassVar[int] = 1


Work = Scoring | Sampling | Reload


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """One prompt of a request, as given and as tokens."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """A completion request, checked."""

    request: CompletionRequest
    prompts: tuple[PromptInput, ...]
    shared: SharedPrefixes | None
    """Where the scores of the prompts are found; None if nobody asked for them."""
    scoring: Scoring | None
    sampling: tuple[tuple[Sampling, ...], ...]
    """Per prompt, the pieces that make up its `n` completions; empty if nothing is sampled."""


def completion_job(request: CompletionRequest, model: LanguageModel) -> CompletionJob:
    """The work of a completion request. Raises ApiError for what vLLM refuses too, and for what this server cannot do."""
    _check_sampling(request, model)
    prompts = _prompts(request, model)
    _check_answer(request, [len(prompt.token_ids) for prompt in prompts])
    shared = share_prefixes([prompt.token_ids for prompt in prompts]) if request.scores_prompt else None
    return CompletionJob(
        request=request,
        prompts=prompts,
        shared=shared,
        scoring=Scoring(groups=shared.groups, top_k=_prompt_top_k(request)) if shared and shared.groups else None,
        sampling=tuple(_pieces(request, prompt) for prompt in prompts),
    )


def _check_sampling(request: CompletionRequest, model: LanguageModel) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1, found 0 (0 is for echo = true alone)", param="max_tokens")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise ApiError(400, f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}", param="temperature")
    if request.temperature == 0 and request.n > 1:
        raise ApiError(400, f"n must be 1 when temperature is 0, found {request.n}", param="n")
    if "" in request.stop_strings:
        raise ApiError(400, "stop must not hold an empty string", param="stop")
    if any(len(stop) > MAX_STOPS for stop in request.stop_strings):
        raise ApiError(400, f"stop must not hold a string of more than {MAX_STOPS} characters", param="stop")
    if not set(request.stop_token_ids) <= set(model.eos_token_ids):
        own = list(model.eos_token_ids)
        raise ApiError(400, f"stop_token_ids may name the model's end tokens only, {own}", param="stop_token_ids")


def _prompts(request: CompletionRequest, model: LanguageModel) -> tuple[PromptInput, ...]:
    """The four forms of `prompt`."""
    given = request.prompt
    if given is None or given in ("", []):
        raise ApiError(400, "prompt must be given, and not be empty", param="prompt")
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if not (all(isinstance(one, str) for one in several) or all(isinstance(one, list) for one in several)):
        raise ApiError(400, "prompt must be a string, strings, token ids or lists of token ids", param="prompt")
    if len(several) * request.n > MAX_CHOICES:
        raise ApiError(400, f"{len(several)} prompts times n = {request.n} is more than {MAX_CHOICES}; split the request")
    prompts, num_ids = list[PromptInput](), 0
    for one in several:
        prompts.append(_prompt(one, request, model))
        num_ids += len(prompts[-1].token_ids)
        if num_ids > MAX_TOKENS:
            raise ApiError(413, f"the prompts have more than {MAX_TOKENS} tokens; split the request", param="prompt")
    return tuple(prompts)


def _prompt(given: str | list[Any], request: CompletionRequest, model: LanguageModel) -> PromptInput:
    text = given if isinstance(given, str) else None
    ids = given if text is None else encode(text, model, add_special_tokens=request.add_special_tokens)
    prompt = PromptInput(text=text, token_ids=token_ids(ids, model, "prompt"))
    check_length(len(prompt.token_ids), request.max_tokens, model, param="prompt")
    return prompt


def _check_answer(request: CompletionRequest, lengths: Sequence[int]) -> None:
    """Raises ApiError if so many log-probs, most likely tokens and ids are wanted that the answer takes too much memory."""
    shown = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        shown += 1 + request.logprobs
    of_prompts = sum(lengths) * request.n * (shown * LOGPROB_BYTES + ID_BYTES)
    sampled = 0 if request.logprobs is None else 1 + request.logprobs
    of_completions = len(lengths) * request.n * request.max_tokens * (sampled * LOGPROB_BYTES + TOKEN_BYTES)
    num_bytes = of_prompts + of_completions
    if num_bytes > MAX_ANSWER_BYTES:
        raise ApiError(
            400,
            f"the answer could take {num_bytes / 1e6:.0f} MB of memory, more than {MAX_ANSWER_BYTES / 1e6:g}; ask for fewer "
            "completions, tokens or log-probs at once",
        )


def _prompt_top_k(request: CompletionRequest) -> int | None:
    wanted = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
    if request.echo and request.logprobs:  # echo with logprobs = 0 shows no ranks
        wanted.append(request.logprobs)
    return max(wanted, default=None)


def _pieces(request: CompletionRequest, prompt: PromptInput) -> tuple[Sampling, ...]:
    """A completion depends on the seed and on its number alone; without a seed every prompt draws its own."""
    if request.max_tokens == 0:
        return ()
    seed = secrets.randbits(63) if request.seed in (None, -1) else request.seed
    return tuple(
        Sampling(
            prompt=Prompt(id=f"{seed}/{start}", text="", token_ids=prompt.token_ids),
            params=SamplingParams(
                n=min(SAMPLING_ROWS, request.n - start),
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
            ),
            top_k=request.logprobs or 0,
        )
        for start in range(0, request.n, SAMPLING_ROWS)
    )


def score_work(request: ScoreRequest, model: LanguageModel) -> Scoring:
    """The work of a score request. Raises ApiError for ids that are none and for lengths that do not fit."""
    groups = []
    for i, group in enumerate(request.groups):
        prompt = token_ids(group.prompt, model, f"groups[{i}].prompt")
        completions = tuple(token_ids(c, model, f"groups[{i}].completions[{k}]") for k, c in enumerate(group.completions))
        check_length(len(prompt), max(map(len, completions)), model, param=f"groups[{i}]")
        groups.append(Tokens(prompt, completions))
    return Scoring(groups=tuple(groups), temperature=request.temperature)


def scoring_pieces(work: Scoring, max_tokens: int) -> list[Scoring]:
    """The work in order, in pieces of about `max_tokens` tokens, so that others can take turns.

    A group larger than that is cut by its completions, as micro-batches cut it too: each piece runs the prompt again.
    """
    max_tokens = max(max_tokens, SCORING_TOKENS)
    pieces: list[list[Tokens]] = [[]]
    size = 0
    for group in work.groups:
        num_rows = max(SCORING_ROWS, max_tokens // (len(group.prompt_ids) + max(map(len, group.completions))))
        for start in range(0, len(group.completions), num_rows):
            part = group.rows(start, start + num_rows)
            num_tokens = len(part.prompt_ids) + sum(map(len, part.completions))
            if size and size + num_tokens > max_tokens:
                pieces.append([])
                size = 0
            pieces[-1].append(part)
            size += num_tokens
    return [replace(work, groups=tuple(piece)) for piece in pieces]


def encode(text: str, model: LanguageModel, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises ApiError for one that is too long or no Unicode text (half a surrogate pair)."""
    try:
        is_long = len(text) > MAX_TEXT or len(text.encode()) > MAX_TEXT
    except UnicodeEncodeError as error:
        raise ApiError(400, f"the text is not valid Unicode: {error.reason}", param="prompt") from error
    if is_long:
        raise ApiError(400, f"a text of {len(text)} characters takes more than {MAX_TEXT} bytes", param="prompt")
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def token_ids(value: Any, model: LanguageModel, param: str) -> tuple[int, ...]:
    """A list of token ids, at least one, all of the model's vocabulary. Raises ApiError for anything else."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ApiError(400, f"{param} must be a list of token ids", param=param)
    if not value:
        raise ApiError(400, f"{param} must hold at least one token", param=param)
    outside = min(value) if min(value) < 0 else max(value)
    if not 0 <= outside < model.vocab_size:
        raise ApiError(400, f"{param}: token id {outside} is outside the vocabulary of {model.vocab_size}", param=param)
    return tuple(value)


def check_length(num_prompt: int, num_completion: int, model: LanguageModel, *, param: str) -> None:
    """Raises ApiError if prompt and completion do not fit the model's context."""
    if num_prompt + num_completion > model.context_length:
        raise ApiError(
            400,
            f"the model's context is {model.context_length} tokens; {num_prompt} of the prompt and {num_completion} of the "
            f"completion do not fit. {model.context_note}".rstrip(),
            param=param,
        )
