"""Stage 1 of 7. Problem -> Prompt, and the endless shuffled stream of them.

Before: the task's problems. After: rollout/embedded.py (or the demonstrations, for algorithms that learn from them).
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from topd.config import TaskConfig
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.run.seeding import stream
from topd.tasks.rendering import Rendered, Renderer
from topd.tasks.task import Problem
from topd.types import Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompts:
    """Prompts that can be sampled from, and what the caller has to say about the others."""

    prompts: list[Prompt]
    too_long: tuple[Problem, ...] = ()
    """Problems with more than `task.max_prompt_tokens` tokens."""
    unknown: tuple[tuple[str, str], ...] = ()
    """(source, characters) of every problem with characters that the tokenizer maps to a control token, or to nothing."""
    num_as_given: int = 0
    """Prompts that the data holds rendered already."""

    def notices(self, name: str, *, too_long_are: str) -> list[str]:
        """Notices about these prompts; `too_long_are` states the treatment of those that are too long."""
        lines = []
        if self.too_long:
            lines.append(f"{len(self.too_long)} {name} problems have more than task.max_prompt_tokens tokens: {too_long_are}")
        if self.unknown:
            where, characters = self.unknown[0]
            lines.append(
                f"{len(self.unknown)} {name} problems hold characters that the tokenizer does not know, the first is {where}: "
                f"{characters[:20]!r}. The models see its unknown or padding token there, or nothing."
            )
        if self.num_as_given:
            lines.append(f"{self.num_as_given} {name} prompts begin with a control token: taken as rendered already")
        return lines


def make_prompts(
    problems: Sequence[Problem],
    model: LanguageModel,
    config: TaskConfig,
    *,
    name: str,
    room: int,
    room_key: str = "rollout.max_completion_tokens",
) -> RenderedPrompts:
    """Render and tokenize. Raises ConfigError, naming `room_key`, if a prompt and `room` tokens exceed the model's context."""
    renderer = Renderer(model.tokenizer, config)
    rendered = [renderer(problem) for problem in problems]
    prompts = [_prompt(problem, rendered[i], f"{name}/{i}") for i, problem in enumerate(problems)]
    longest = config.max_prompt_tokens or math.inf
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
    if prompts and not kept:
        raise ConfigError(f"task.max_prompt_tokens = {config.max_prompt_tokens} drops every {name} prompt. Raise it.")
    for prompt in kept:
        if len(prompt.token_ids) + room > model.context_length:
            raise ConfigError(
                f"{prompt.problem.source or prompt.id}: the prompt has {len(prompt.token_ids)} tokens; with {room} completion "
                f"tokens it exceeds the context of {model.name} ({model.context_length}). Lower {room_key}, or set "
                f"task.max_prompt_tokens to drop long prompts. {model.context_note}".rstrip()
            )
    return RenderedPrompts(
        prompts=kept,
        too_long=tuple(prompt.problem for prompt in prompts if len(prompt.token_ids) > longest),
        unknown=tuple((p.source or prompts[i].id, rendered[i].unknown) for i, p in enumerate(problems) if rendered[i].unknown),
        num_as_given=sum(item.as_given for item in rendered),
    )


def _prompt(problem: Problem, rendered: Rendered, prompt_id: str) -> Prompt:
    return Prompt(
        id=prompt_id,
        text=rendered.text,
        token_ids=rendered.token_ids,
        answer=problem.answer,
        domain=problem.domain,
        demonstration=problem.demonstration,
        problem=problem,
    )


def demonstrate(prompt: Prompt, model: LanguageModel, max_tokens: int) -> Rollout:
    """The prompt's demonstration as a completion, ended by the model's end token unless it is cut at `max_tokens`."""
    if prompt.demonstration is None:
        raise ConfigError(
            f"prompt {prompt.id} has no demonstration, which this algorithm learns from. Add the field to the data."
        )
    token_ids = model.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
    token_ids = (*token_ids, model.eos_token_ids[0])[:max_tokens]
    return Rollout(
        token_ids=token_ids,
        logprobs=torch.zeros(len(token_ids)),
        finish_reason="stop" if token_ids[-1] in model.eos_token_ids else "length",
        text=prompt.demonstration,
    )


class PromptStream:
    """An endless stream in shuffled passes. It has no state: the prompts of a step are a function of (seed, step)."""

    def __init__(self, prompts: Sequence[Prompt], *, per_step: int, seed: int) -> None:
        self.prompts = prompts
        self.per_step = per_step
        self.seed = seed

    def sha256(self) -> str:
        """Digest of the problems, in order: a resumed run must see the same."""
        parts = [(p.text, p.answer, p.demonstration, *([p.domain] if p.domain != "default" else [])) for p in self.prompts]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def take(self, step: int) -> list[Prompt]:
        """The prompts of step 1, 2, ...; one met again in a later pass gets a new id, hence new random numbers."""
        first = (step - 1) * self.per_step
        places = [divmod(position, len(self.prompts)) for position in range(first, first + self.per_step)]
        orders = {epoch: stream(self.seed, "prompts", epoch).permutation(len(self.prompts)) for epoch in {e for e, _ in places}}
        return [self._prompt(epoch, int(orders[epoch][place])) for epoch, place in places]

    def _prompt(self, epoch: int, index: int) -> Prompt:
        prompt = self.prompts[index]
        return dataclasses.replace(prompt, id=f"{prompt.id}#{epoch}") if epoch else prompt
