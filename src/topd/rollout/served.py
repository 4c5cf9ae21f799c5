"""Sampling through `/v1/completions`: prompts go out as token ids, completions come back as token ids with log-probs."""

import reprlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from typing import Any

import httpx2
import torch

from topd.endpoint.background import Background
from topd.endpoint.dialects import is_logprob
from topd.endpoint.faults import BadAnswer, Fault, Forbidden
from topd.endpoint.replica import Request
from topd.endpoint.served import ServedModel
from topd.errors import RunStopped
from topd.models.language_model import LanguageModel
from topd.rollout.engine import SamplingParams
from topd.run.seeding import stream
from topd.types import Prompt, Rollout, RolloutGroup

NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said explicitly, because servers take their defaults from the model's generation_config.json."""


class ServedEngine:
    """Samples from a served model. `student` lends its tokenizer; completions end with one of `eos_token_ids`."""

    kind = "served"
    strict_ends = False
    """True if completions must end exactly as the student's do. An evaluated teacher may have other end tokens."""
    tolerance: float | None = None
    exact = False
    way_out = " A teacher is only sampled from to evaluate it, which --eval.teacher false leaves out."

    def __init__(
        self, served: ServedModel, background: Background, *, student: LanguageModel, eos_token_ids: Sequence[int]
    ) -> None:
        self.served = served
        self.background = background
        self.student = student
        self.eos_token_ids = eos_token_ids
        self.policy_version = 0

    @property
    def context_length(self) -> int | None:
        length = self.served.card.context_length
        return None if length is None else length - self.served.dialect.spare_tokens

    def load_weights(self, policy_version: int) -> None:
        """No-op: a teacher's weights never change."""

    def describe(self) -> str:
        return f"{self.served.card.id}, served"

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_groups: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    ) -> list[RolloutGroup]:
        futures = [self.background.submit(self._sample(prompt, params)) for prompt in prompts]
        try:
            return self._collect(futures, on_tokens, on_groups)
        except Forbidden as fault:
            raise RunStopped(self.served.forbidden(fault)) from fault
        except Fault as fault:
            raise RunStopped(
                f"{self.served.role}: a prompt could not be sampled: {fault}. Look at the servers, then run the same command "
                f"with --run.resume true.{self.way_out}"
            ) from fault
        finally:
            for future in futures:
                future.cancel()

    def _collect(
        self,
        futures: Sequence["Future[RolloutGroup]"],
        on_tokens: Callable[[int], None],
        on_groups: Callable[[Sequence[RolloutGroup]], None],
    ) -> list[RolloutGroup]:
        for future in as_completed(futures):
            group = future.result()
            on_tokens(sum(map(len, group.completions)))
            on_groups([group])
        return [future.result() for future in futures]

    async def _sample(self, prompt: Prompt, params: SamplingParams) -> RolloutGroup:
        version = self.policy_version
        seed = int(stream(*params.seed, prompt.id).integers(2**31))
        ends = {"stop_token_ids": list(self.eos_token_ids)} if self.strict_ends else {}
        body = {
            "model": self.served.card.id,
            "prompt": list(prompt.token_ids),
            "n": params.n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            **NEUTRAL,
            **ends,
        }
        num_tokens = params.n * (len(prompt.token_ids) + params.max_tokens)
        request = Request(path="/v1/completions", json=body, num_tokens=num_tokens)
        rollouts = await self.served.pool.send(lambda: request, lambda response: self._read(response, prompt, params))
        return RolloutGroup(prompt=prompt, rollouts=rollouts, policy_version=version)

    def _read(self, response: httpx2.Response, prompt: Prompt, params: SamplingParams) -> tuple[Rollout, ...]:
        """The checked completions of one prompt. Raises BadAnswer."""
        try:
            choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(params.n)):
                raise BadAnswer(f"{response.url.host}: {len(choices)} completions for n = {params.n}")
            return tuple(self._rollout(choice, prompt, params) for choice in choices)
        except BadAnswer:
            raise
        except Exception as error:  # foreign bytes can fail anywhere in json, in any way
            said = reprlib.repr(str(error))
            raise BadAnswer(f"{response.url.host}: an answer that cannot be read ({type(error).__name__}: {said})") from None

    def _rollout(self, choice: dict[str, Any], prompt: Prompt, params: SamplingParams) -> Rollout:
        token_ids, logprobs = tuple(choice["token_ids"]), choice["logprobs"]["token_logprobs"]
        sent = choice.get("prompt_token_ids")
        if sent is not None and tuple(sent) != prompt.token_ids:
            raise BadAnswer("the server sampled after other tokens than were sent")
        if not 0 < len(token_ids) <= params.max_tokens or len(logprobs) != len(token_ids):
            raise BadAnswer(f"{len(logprobs)} log-probs for {len(token_ids)} tokens, at most {params.max_tokens} wanted")
        if not all(type(token) is int and 0 <= token < self.student.vocab_size for token in token_ids):
            raise BadAnswer("a sampled token is outside the student's vocabulary")
        if not all(map(is_logprob, logprobs)):
            raise BadAnswer("a sampled token has a log-prob that is none")
        stopped = token_ids[-1] in self.eos_token_ids or (not self.strict_ends and choice.get("finish_reason") == "stop")
        if not stopped and len(token_ids) < params.max_tokens:
            raise BadAnswer(f"a completion ends with token {token_ids[-1]}, which is not an end token of the student")
        if self.strict_ends and not set(token_ids[:-1]).isdisjoint(self.eos_token_ids):
            raise BadAnswer("a completion goes on after an end token of the student")
        return Rollout(
            token_ids=token_ids,
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            finish_reason="stop" if stopped else "length",
            text=self.student.tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=True),
        )
