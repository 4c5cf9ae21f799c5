"""Problem -> text and token ids of its prompt. Text of the data never becomes a control token, unless all is rendered already."""

import functools
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, meta
from jinja2.ext import loopcontrols
from transformers import PreTrainedTokenizerBase

from topd.config import TaskConfig
from topd.errors import ConfigError, first_line
from topd.tasks.task import Message, Problem

MARK = "MARK"
"""Stands for a question, to see what is put around it."""

FOREIGN = re.compile(
    r"\s*(?:<\|begin_of_text\|>|<\|start_header_id\|>|<\|im_start\|>|<start_of_turn>|<bos>|<s>\s*\[INST\]|\[INST\])"
)
"""Beginnings of prompts that are rendered, by any template in wide use."""

GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""A tag of transformers' own, which jinja2 does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt as the model reads it."""

    text: str
    token_ids: tuple[int, ...]
    unknown: str = ""
    """Characters of the problem, its demonstration included, that the tokenizer maps to a control token, or to nothing."""
    as_given: bool = False
    """True if the data holds it already rendered."""


class Renderer:
    """Renders the problems of one task for one tokenizer. Raises ConfigError for settings that do not fit it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TaskConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._uses_template = config.template != "plain" and tokenizer.chat_template is not None
        self._check_settings()
        around = self._around()
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        marks = {token for token, special in added.items() if special or (token in around and not token.isalnum())}
        marks = {mark for mark in marks | set(tokenizer.all_special_tokens) if mark.strip()}
        self._controls = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)")
        self._control_ids = set(tokenizer.convert_tokens_to_ids(sorted(marks)))
        self._start = self._start_ids()
        self._adds_start = not around or self._ids(around)[: len(self._start)] == self._start
        opening = around.partition(MARK)[0].lstrip().removeprefix(tokenizer.bos_token or "").lstrip()
        self._opening = "" if self._controls.search(opening) else opening
        self._bos = tokenizer.bos_token or ""
        control = self._controls.match(opening)
        self._head = control[0] if control and self._uses_template else ""
        asked = self._around(add_generation_prompt=True) if self._head else ""
        self._reply = (asked.removeprefix(around).split() or [""])[0] if asked.startswith(around) else ""
        self._is_kept = functools.cache(self._keeps)
        self._is_dropped = functools.cache(self._drops)
        self._is_mapped = functools.cache(lambda character: not self._control_ids.isdisjoint(self._ids(character)))

    def __call__(self, problem: Problem) -> Rendered:
        """The prompt of a problem. Raises ConfigError, with its source, for one that cannot be rendered as it is meant."""
        where = problem.source or repr(problem.question[:80])
        given = not problem.messages and self._controls.match(problem.question) is not None
        if given:
            self._check_given(problem, where)
            text, parts = problem.question, self._controls.split(problem.question)
        else:
            messages = self._messages(problem)
            parts = [message["content"] for message in messages]
            for message in messages:
                self._check_text(message["content"], f"{where}: the {message['role']} message")
            self._check_bare(messages[-1]["content"], where)
            text = self._templated(messages, where) if self._uses_template else self._plain(problem, where)
        token_ids = self._ids(text)
        unknown = self._unknown(text, parts, token_ids)
        if not token_ids or (unknown and not self._is_read(problem.question)):
            raise ConfigError(f"{where}: the tokenizer knows no character of the question {problem.question[:80]!r}.")
        if (self._adds_start and token_ids[: len(self._start)] != self._start) if given else not self._uses_template:
            token_ids = self._start + token_ids
        if problem.demonstration is not None:
            unknown += self._unknown_in_demonstration(problem.demonstration, where)
        return Rendered(text=text, token_ids=tuple(token_ids), unknown=unknown, as_given=given)

    def _check_text(self, text: str, what: str) -> None:
        """Raise ConfigError if some of the text would become a control token."""
        if mark := self._controls.search(text):
            raise ConfigError(
                f"{what} holds {mark[0]!r}, which the tokenizer reads as a control token, not as text: "
                f"{text[max(mark.start() - 30, 0) : mark.end() + 30]!r}. Remove it, or put a space into it. Prompts that are "
                "rendered already must be one string that begins with such a token."
            )

    def _check_settings(self) -> None:
        config, tokenizer = self._config, self._tokenizer
        if config.template == "chat" and tokenizer.chat_template is None:
            raise ConfigError('task.template = "chat", but the tokenizer has no chat template. Set task.template = "plain".')
        for key in ("system_prompt", "template_arguments"):
            if getattr(config, key) not in (None, {}) and not self._uses_template:
                lack = 'task.template is "plain"' if config.template == "plain" else "the tokenizer has none"
                raise ConfigError(f"task.{key} needs a chat template, and {lack}. Remove it.")
        if not config.template_arguments:
            return
        template = Environment(extensions=[loopcontrols]).parse(GENERATION.sub("", tokenizer.get_chat_template()))
        own = {
            "messages",
            "raise_exception",
            "strftime_now",
            "namespace",
            *inspect.signature(tokenizer.apply_chat_template).parameters,
        }
        read = meta.find_undeclared_variables(template) - own - set(tokenizer.special_tokens_map)
        if ignored := sorted(set(config.template_arguments) - read):
            raise ConfigError(
                f"task.template_arguments.{ignored[0]}: the tokenizer's chat template has no such argument. "
                f"It reads {', '.join(sorted(read)) or 'none'}. Remove it."
            )

    def _check_given(self, problem: Problem, where: str) -> None:
        config = self._config
        if self._head and not problem.question.lstrip().removeprefix(self._bos).startswith(self._head):
            raise ConfigError(
                f"{where}: `prompt` begins with a control token, but not with {self._head!r}, as the chat template does. One "
                "that is rendered already must; a question about the token cannot hold it."
            )
        if self._reply and self._reply not in problem.question:
            raise ConfigError(
                f"{where}: `prompt` begins with a control token, so it is rendered already, but holds no {self._reply!r}, "
                "after which the model answers. Render it with add_generation_prompt=True."
            )
        if config.template == "chat":
            raise ConfigError(
                f'{where}: `prompt` begins with a control token, so it is rendered already, and task.template = "chat" would '
                'render it again. Set task.template = "plain", or give the bare question.'
            )
        keys = ("system_prompt", "prompt_suffix", "template_arguments")
        ignored = [f"task.{key}" for key in keys if getattr(config, key) not in (None, "", {})]
        ignored += ["`system_prompt`"] if problem.system_prompt is not None else []
        if ignored:
            raise ConfigError(
                f"{where}: `prompt` begins with a control token, so it is rendered already, and {ignored[0]} has no place in it. "
                "Remove that, or give the bare question."
            )

    def _check_bare(self, question: str, where: str) -> None:
        """Raise ConfigError for a text that is rendered already, though no control token of this tokenizer says so."""
        if self._config.template == "plain":
            return
        if self._uses_template and self._opening and question.startswith(self._opening):
            raise ConfigError(
                f"{where}: `prompt` begins with {self._opening!r}, as the chat template does, so it would be rendered twice. "
                'Give the bare question, or set task.template = "plain" if the prompts are rendered already.'
            )
        if foreign := FOREIGN.match(question):
            raise ConfigError(
                f"{where}: `prompt` begins with {foreign[0]!r}, so it is rendered for another model: this tokenizer reads that "
                'as text. Give the bare question, or set task.template = "plain" if that is meant.'
            )

    def _plain(self, problem: Problem, where: str) -> str:
        what = "a list of messages" if problem.messages else "`system_prompt`" if problem.system_prompt is not None else None
        if what is not None:
            lack = 'task.template is "plain"' if self._config.template == "plain" else "the tokenizer has none"
            raise ConfigError(f"{where}: {what} needs a chat template, and {lack}. Give `prompt` as one text, or choose another.")
        return problem.question + self._config.prompt_suffix

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        system = self._config.system_prompt if problem.system_prompt is None else problem.system_prompt
        turns = problem.messages or (Message(role="user", content=problem.question),)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [{"role": turn.role, "content": turn.content} for turn in turns]
        messages[-1]["content"] += self._config.prompt_suffix
        return messages

    def _templated(self, messages: list[dict[str, str]], where: str) -> str:
        try:
            text = self._apply(messages, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{where}: the tokenizer's chat template refuses the messages ({', '.join(m['role'] for m in messages)}): "
                f"{first_line(error)}. A template without a system role needs them without system_prompt."
            ) from error
        kept = self._is_kept(tuple(message["role"] for message in messages))
        for message, is_kept in zip(messages, kept, strict=True):
            if message["role"] == "assistant":
                continue  # its reasoning may be cut
            if not is_kept or message["content"].strip() not in text:
                raise ConfigError(
                    f"{where}: the tokenizer's chat template leaves out or changes the {message['role']} message "
                    f"{message['content'][:80]!r}. Remove it, or use another template."
                )
        return text

    def _apply(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._config.template_arguments
            )
        )

    def _keeps(self, roles: tuple[str, ...]) -> list[bool]:
        """For each message of a conversation: True if the template renders it; all True if it refuses one made of marks."""
        marks = [f"{MARK}{i}{MARK}" for i in range(len(roles))]
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self._apply(turns, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError):
            return [True] * len(roles)
        return [mark in text for mark in marks]

    def _around(self, *, add_generation_prompt: bool = False) -> str:
        """A rendered user's turn; empty without a template, or if it refuses one."""
        if self._tokenizer.chat_template is None:
            return ""
        try:
            return self._apply([{"role": "user", "content": MARK}], add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, ValueError, LookupError):
            return ""

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _start_ids(self) -> list[int]:
        """Tokens that the tokenizer adds before a text. Those added after one would end the prompt and are omitted."""
        whole, bare = list(self._tokenizer(MARK)["input_ids"]), self._ids(MARK)
        return whole[: next((at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare), 0)]

    def _unknown(self, text: str, parts: Iterable[str], token_ids: list[int]) -> str:
        """The distinct characters of `parts` that became a control token, or nothing."""
        characters = [character for part in parts for character in dict.fromkeys(part) if self._is_dropped(character)]
        if sum(token_id in self._control_ids for token_id in token_ids) > len(self._controls.findall(text)):
            characters += [character for part in parts for character in self._mapped_to_controls(part)]
        return "".join(dict.fromkeys(characters))

    def _mapped_to_controls(self, part: str) -> list[str]:
        if not self._tokenizer.is_fast:
            return [character for character in part if self._is_mapped(character)]
        encoded = self._tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [part[begin:end] for token_id, (begin, end) in spans if token_id in self._control_ids]

    def _unknown_in_demonstration(self, text: str, where: str) -> str:
        self._check_text(text, f"{where}: the demonstration")
        if not any(self._is_dropped(character) or self._is_mapped(character) for character in set(text)):
            return ""  # demonstrations are long, and tokenized only where an algorithm learns from them
        return self._unknown(text, [text], self._ids(text))

    def _drops(self, character: str) -> bool:
        """True if a visible character, or some of its bytes, has no token."""
        if character.isspace() or not character.isprintable() or character == "\N{REPLACEMENT CHARACTER}":
            return False
        decoded = str(self._tokenizer.decode(self._ids(character))).strip()
        return not decoded or "\N{REPLACEMENT CHARACTER}" in decoded

    def _is_read(self, question: str) -> bool:
        return not self._control_ids.issuperset(self._ids(question))
