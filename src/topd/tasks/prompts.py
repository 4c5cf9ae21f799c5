"""Stage 1 of 7. Problem -> Prompt, and the endless shuffled stream of them.

Before: the task's problems. After: rollout/embedded.py (or the demonstrations, for algorithms that learn from them).
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from topd.config import TaskConfig
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.run.seeding import stream
from topd.tasks.task import Problem
from topd.types import Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompts:
    """Prompts that can be sampled from, and what the caller has to say about the others."""

    prompts: list[Prompt]
    too_long: tuple[Problem, ...] = ()
    """Problems with more than `task.max_prompt_tokens` tokens."""
    unknown: tuple[tuple[str, str], ...] = ()
    """(id, characters) of every prompt with characters that the tokenizer maps to its unknown or padding token."""

    def notices(self, name: str, *, too_long_are: str) -> list[str]:
        """What a person should know about these prompts; `too_long_are` says what becomes of those that are too long."""
        lines = []
        if self.too_long:
            lines.append(f"{len(self.too_long)} {name} problems have more than task.max_prompt_tokens tokens: {too_long_are}")
        if self.unknown:
            where, characters = self.unknown[0]
            lines.append(
                f"{len(self.unknown)} {name} prompts hold characters that the tokenizer does not know, the first is {where}: "
                f"{characters!r}. The models see its unknown or padding token there."
            )
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
    """Render and tokenize. Those with more than `task.max_prompt_tokens` tokens are set apart.

    Raises ConfigError for a prompt that, with `room` completion tokens, exceeds the model's context; `room_key` is the setting
    behind `room`.
    """
    prompts = [_prompt(problem, model.tokenizer, config, f"{name}/{i}") for i, problem in enumerate(problems)]
    longest = config.max_prompt_tokens or math.inf
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
    if prompts and not kept:
        raise ConfigError(f"task.max_prompt_tokens = {config.max_prompt_tokens} drops every {name} prompt. Raise it.")
    for prompt in kept:
        if len(prompt.token_ids) + room > model.context_length:
            raise ConfigError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens; with {room} completion tokens it exceeds the context of "
                f"{model.name} ({model.context_length}). Lower {room_key}, or set task.max_prompt_tokens to drop long "
                f"prompts. {model.context_note}".rstrip()
            )
    return RenderedPrompts(
        prompts=kept,
        too_long=tuple(prompt.problem for prompt in prompts if len(prompt.token_ids) > longest),
    )


def render(problem: Problem, tokenizer: PreTrainedTokenizerBase, config: TaskConfig) -> str:
    """The text of a prompt. A chat template is used if the section asks for it, or by default if the tokenizer has one."""
    question = problem.question + config.prompt_suffix
    has_template = tokenizer.chat_template is not None
    if config.template == "chat" and not has_template:
        raise ConfigError('task.template = "chat", but the tokenizer has no chat template. Set task.template = "plain".')
    if config.system_prompt is not None and not has_template:
        raise ConfigError("task.system_prompt needs a chat template, and the tokenizer has none. Remove it.")
    if config.template == "plain" or not has_template:
        return question
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    messages = [*system, {"role": "user", "content": question}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ConfigError(
            f"the tokenizer's chat template refuses the prompt: {error}. A template without a system role "
            "needs task.system_prompt unset."
        ) from error


def _prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase, config: TaskConfig, prompt_id: str) -> Prompt:
    text = render(problem, tokenizer, config)
    templated = text != problem.question + config.prompt_suffix
    # a rendered template already holds the tokenizer's own start tokens
    token_ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    if not token_ids:
        raise ConfigError(f"prompt {prompt_id} has no tokens: {problem.question!r}.")
    return Prompt(
        id=prompt_id,
        text=text,
        token_ids=tuple(token_ids),
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
        parts = [(p.text, p.answer, p.demonstration) for p in self.prompts]
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
