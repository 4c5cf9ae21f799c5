"""The final answer of a completion: one rule, written down in docs/data.md. Nothing but that answer is graded."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
MARKER = re.compile(
    r"(?:####|\banswer[\s*_]*(?:is|are|was|[:\uff1a=])|答案[\s*_]*[是为為:\uff1a=])[\s*_:\uff1a]*(?:(?:option|choice)\s+)?",
    re.IGNORECASE,
)
"""What introduces an answer; the text after the last one counts, to the end of the sentence or line."""
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[\u3002\uff01\uff1f\n]")

WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
"""A word set as text; alone in a box, it is the word that counts."""

AROUND = " \t\r\n*_`\"'"
"""White space, emphasis and quotes around an answer."""


def final_answer(completion: str, *, pattern: str | None = None, whole_text: bool = False) -> str | None:
    """The answer that a completion ends with, or None if it gives none.

    With `pattern` (task.answer_pattern): its last match, and nothing else. Without: of the text after the last `</think>`, the
    last `\\boxed{...}`, and no answer if that is empty or not closed; else the last `<answer>...</answer>`, likewise; else the
    sentence after the last answer marker (`####`, "answer is", "Answer:"); else the last line that is not blank. With
    `whole_text` the whole text takes the place of marker and line, for answers of several lines. An empty answer is none.
    """
    if pattern is not None:
        return _last_match(pattern, completion)
    text = _after_thinking(completion)
    if BOX.search(text):
        boxed = last_boxed(text)
        wrapped = WRAPPED.fullmatch(boxed or "")
        return wrapped[1].strip() or None if wrapped else boxed
    _, opened, inside = text.rpartition("<answer>")
    if opened:
        answer, closed, _ = inside.partition("</answer>")
        return (closed and answer.strip()) or None
    return (text.strip() if whole_text else _stated(text)) or None


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
    matches = re.findall(pattern, completion)
    return (matches[-1].strip() or None) if matches else None


def _after_thinking(completion: str) -> str:
    """What follows the reasoning; nothing if that is not over."""
    _, closed, after = completion.rpartition("</think>")
    return after if closed or "<think>" not in after else ""


def _stated(text: str) -> str:
    """The sentence after the last marker, or the last line."""
    markers = list(MARKER.finditer(text))
    if markers:
        return SENTENCE_END.split(text[markers[-1].end() :], maxsplit=1)[0].strip(AROUND)
    return next((line.strip(AROUND) for line in reversed(text.splitlines()) if line.strip(AROUND)), "")
