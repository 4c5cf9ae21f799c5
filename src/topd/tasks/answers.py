"""The final answer of a completion: one rule, written down in docs/data.md. Nothing but that answer is graded."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
MARKER = re.compile(r"####|答案\s*[是为為]?|\banswer\b\s*(?:is|are|was|=)?", re.IGNORECASE)
"""What introduces an answer on the last line; the text after the last one counts."""

AROUND = " \t\r\n*_`\"'"
"""White space, emphasis and quotes around an answer."""


def final_answer(completion: str, *, pattern: str | None = None, whole_text: bool = False) -> str | None:
    """The answer that a completion ends with, or None if it gives none.

    With `pattern` (task.answer_pattern): its last match, and nothing else. Without: of the text after the last `</think>`, the
    last `\\boxed{...}`, and no answer if that is empty or not closed; else the last `<answer>...</answer>`; else the last line
    that is not blank, from an answer marker on (`####`, "answer is", "Answer:"), or the whole text with `whole_text`, for
    answers of several lines. An empty answer is none.
    """
    if pattern is not None:
        return _last_match(pattern, completion)
    text = _after_thinking(completion)
    if BOX.search(text):
        return last_boxed(text)
    if "<answer>" in text.lower():
        tags = ANSWER_TAG.findall(text)
        return (tags[-1].strip() or None) if tags and _closes(text) else None
    return (text.strip() if whole_text else _last_line(text)) or None


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` of a text holds, by counting braces; None without a box, or if it is empty or not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes or boxes[-1][1] is None:
        return None
    depth, start = 1, boxes[-1].end()
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is no brace
        if depth == 0:
            return text[start : brace.start()].strip() or None
    return None


def _last_match(pattern: str, completion: str) -> str | None:
    last = None
    for last in re.finditer(pattern, completion):
        pass
    return None if last is None else ((last[1] or "").strip() or None)


def _after_thinking(completion: str) -> str:
    """What follows the reasoning; nothing if that is not over."""
    before, closed, after = completion.rpartition("</think>")
    return after if closed or "<think>" not in after else ""


def _closes(text: str) -> bool:
    """Whether the last answer tag that opens is closed."""
    lowered = text.lower()
    return lowered.rfind("<answer>") < lowered.rfind("</answer>")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip(AROUND)]
    if not lines:
        return ""
    markers = list(MARKER.finditer(lines[-1]))
    stated = lines[-1][markers[-1].end() :] if markers else lines[-1]
    return stated.strip(AROUND).lstrip(":：").strip(AROUND)
