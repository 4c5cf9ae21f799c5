"""A row of data -> Problem: our own fields, and those that TRL, verl, MATH and GSM8K files have. docs/data.md lists them."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from topd.errors import ConfigError
from topd.tasks.answers import last_boxed
from topd.tasks.task import Message, Problem

QUESTIONS = ("prompt", "messages", "problem", "question")
ANSWERS = ("answer", "reward_model")
DEMONSTRATIONS = ("demonstration", "completion")
OWN = {"prompt", "answer", "domain", "demonstration", "system_prompt"}
FIELDS = {*OWN, *QUESTIONS, *ANSWERS, *DEMONSTRATIONS, "solution"}

# fmt: off
COMPANIONS = {
    "ability", "correctness_count", "correctness_llama", "correctness_math_verify", "data_source", "dataset", "difficulty",
    "extra_info", "finish_reasons", "generations", "id", "idx", "index", "is_reasoning_complete", "level", "problem_id",
    "problem_source", "problem_type", "question_id", "question_type", "source", "source_prompt", "split", "style", "subject",
    "type", "unique_id", "url", "uuid", "year",
}
# fmt: on
"""Fields beside those of the other forms that say nothing of the question; they are not read."""

REMEDIES = {
    **dict.fromkeys(("instruction", "query", "input", "text"), "Rename it to `prompt`."),
    **dict.fromkeys(("expected_answer", "final_answer", "ground_truth", "gold", "label", "target"), "Rename it to `answer`."),
    **dict.fromkeys(("response", "output", "generated_solution", "rationale"), "Rename it to `demonstration`."),
    "conversations": "Rename it to `messages`, a list of {role, content}.",
    **dict.fromkeys(("choices", "options"), "Write the choices into the question, and the right one's letter into `answer`."),
    **dict.fromkeys(("chosen", "rejected"), "Preferences are not read: rename `chosen` to `completion`, remove `rejected`."),
    **dict.fromkeys(("image", "images", "videos", "audio"), "Only text is read."),
    "tools": "Tools are not read.",
    "chat_template_kwargs": "Set task.template_arguments.",
}

WORKED = re.compile(r"####[^\S\n]*([^\n#]*[^\s#])\s*(?=\n|$)(?!.*####)", re.DOTALL)
"""GSM8K's form of an answer: a worked solution with `#### 72` in it, as a rule on the last line."""
SHORT = re.compile(r"\$[^$]+\$|\\\([^\n]+\\\)|[-+]?[\d.,/]+%?")
"""A solution that is no more than an answer: one formula, or one number."""

THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


class Number(str):
    """The text of a number, as it is written in the data."""

    __slots__ = ()


def check_fields(names: Collection[str], where: str, *, noun: str = "field") -> None:
    """Raise ConfigError for a field that is not read; companions of the forms of others are let through."""
    unknown = set(names) - FIELDS - COMPANIONS
    if not unknown:
        return
    name = min(unknown, key=lambda name: (name not in REMEDIES, name))
    close = difflib.get_close_matches(name, sorted(FIELDS), n=1)
    remedy = REMEDIES.get(name) or (f"Did you mean `{close[0]}`?" if close else "Remove it, or rename it.")
    raise ConfigError(f"{where}: unknown {noun} {name!r}. {remedy} Known are {', '.join(sorted(OWN))}; docs/data.md lists all.")


def problem_from(row: Mapping[str, Any], where: str) -> Problem:
    """A problem from a row's fields (numbers as `Number`). Raises ConfigError for what is missing, wrong or said twice."""
    given = {name: value for name, value in row.items() if value is not None}
    name = _only(QUESTIONS, given, where) or "prompt"
    system, turns = _conversation(given.get(name), f"{where}: `{name}`")
    demonstrations = {kind: _demonstration(given[kind], f"{where}: `{kind}`") for kind in DEMONSTRATIONS if kind in given}
    if name == "messages" and turns[-1].role == "assistant":
        *turns, last = turns
        demonstrations["messages"] = last.content
    if not turns or turns[-1].role != "user" or not turns[-1].content.strip():
        remedy = "" if name == "messages" else " (name the field `messages` if its last turn is the demonstration)"
        raise ConfigError(f"{where}: `{name}` must end with a user's message that is not empty{remedy}.")
    answer, worked = answer_from(given, where)
    demonstration = demonstrations.get(_only((*DEMONSTRATIONS, "messages"), demonstrations, where) or "")
    return Problem(
        question=turns[-1].content,
        messages=() if isinstance(given[name], str) else tuple(turns),
        system_prompt=_system_prompt(given, system, where),
        answer=answer,
        domain=_text(given, "domain", where) or "default",
        demonstration=demonstration or worked,
        source=where,
    )


def _only(names: Sequence[str], given: Mapping[str, Any], where: str) -> str | None:
    """The one of `names` that is given, if any is."""
    there = [name for name in names if name in given]
    if len(there) > 1:
        raise ConfigError(f"{where}: `{there[0]}` and `{there[1]}` say the same thing twice. Remove one of them.")
    return there[0] if there else None


def _text(given: Mapping[str, Any], name: str, where: str) -> str | None:
    """The field's text as it is written; None if it is not there, empty or blank."""
    value = given.get(name)
    if not isinstance(value, str | None):
        raise ConfigError(f"{where}: `{name}` must be a string or a number, found {type(value).__name__}.")
    return str(value) if value and value.strip() else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Number)


def _conversation(value: Any, where: str) -> tuple[str | None, list[Message]]:
    """(system message, other messages) of a list of messages, or of a string, which is one user's message."""
    if _is_text(value) and value.strip():
        if re.match(r"\[\s*\{\s*[\"'](?:role|content)[\"']\s*:", value):
            raise ConfigError(f"{where} is a text that holds a list of messages: {value[:80]!r}. Store the list itself.")
        return None, [Message(role="user", content=value)]
    if not isinstance(value, list) or not value:
        what = "nothing" if value is None else f"the number {value}" if isinstance(value, Number) else f"{value!r:.80}"
        raise ConfigError(f"{where} must be a non-empty string, or a list of messages, found {what}.")
    turns = [_message(item, f"{where}, message {number}") for number, item in enumerate(value, 1)]
    system = turns.pop(0)[1] if turns[0][0] == "system" else None
    if any(role == "system" for role, _ in turns):
        raise ConfigError(f"{where}: only the first message may be the system's.")
    return system, [Message(role="user" if role == "user" else "assistant", content=content) for role, content in turns]


def _system_prompt(given: Mapping[str, Any], system: str | None, where: str) -> str | None:
    """The row's own system prompt: its field, or the conversation's system message, which may be empty."""
    own = _text(given, "system_prompt", where)
    if "system_prompt" in given and (own is None or system is not None):
        also = "is blank" if own is None else "is given beside a system message"
        raise ConfigError(f"{where}: `system_prompt` {also}. Remove it; rows without one use task.system_prompt.")
    return own if system is None else system


def _message(item: Any, where: str) -> tuple[str, str]:
    fields = {name: value for name, value in item.items() if value is not None} if isinstance(item, Mapping) else {}
    if {"from", "value"} <= set(fields):
        raise ConfigError(
            f"{where}: `from` and `value` are not read. Rename them to `role` and `content` (human: user, gpt: assistant)."
        )
    if set(fields) != {"role", "content"}:
        raise ConfigError(f"{where} must have `role` and `content`, and nothing else; found {str(item)[:80]}.")
    if fields["role"] not in ("system", "user", "assistant"):
        raise ConfigError(f"{where}: `role` must be system, user or assistant; found {fields['role']!r}.")
    return fields["role"], _content(fields["content"], where)


def _content(value: Any, where: str) -> str:
    """A message's text: a string, or the texts of its parts in a row."""
    if _is_text(value):
        return str(value)
    parts = [{k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {} for part in value or []]
    if not isinstance(value, list) or not all(set(part) == {"type", "text"} and part["type"] == "text" for part in parts):
        raise ConfigError(
            f"{where}: `content` must be a string, or a list of text parts; found {str(value)[:80]}. Only text is read."
        )
    return "".join(_content(part["text"], where) for part in parts)


def _demonstration(value: Any, where: str) -> str | None:
    """A worked completion: its text, or a list with the assistant's one message."""
    if not isinstance(value, list):
        return _text({"": value}, "", where)
    system, turns = _conversation(value, where)
    if system is not None or [turn.role for turn in turns] != ["assistant"]:
        raise ConfigError(f"{where} must be one message of the assistant. Put the turns before it into `prompt`.")
    return turns[0].content


def answer_from(given: Mapping[str, Any], where: str) -> tuple[str | None, str | None]:
    """(the right answer, the worked solution that states it), each None if there is none."""
    answer, solution = _text(given, "answer", where), _text(given, "solution", where)
    if "reward_model" in given:
        model = given["reward_model"]
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise ConfigError(f"{where}: `reward_model` must hold `ground_truth`; found {str(model)[:80]}.")
        truth = _text({"reward_model.ground_truth": model["ground_truth"]}, "reward_model.ground_truth", where)
        if answer and truth and answer != truth:
            raise ConfigError(f"{where}: `answer` is {answer!r}, `reward_model.ground_truth` is {truth!r}. Keep one of them.")
        answer = answer or truth
    if stated := WORKED.search(answer or solution or ""):
        number = stated[1].replace(",", "") if THOUSANDS.fullmatch(stated[1]) else stated[1]
        return number, solution or answer
    if solution and not answer:
        return (solution, None) if SHORT.fullmatch(solution.strip()) else (last_boxed(solution), solution)
    return answer, solution if solution != answer else None
