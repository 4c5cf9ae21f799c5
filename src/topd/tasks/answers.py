"""The final answer of a completion: one rule, written down in docs/data.md. Nothing but that answer is graded."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
HEADED = r"####(?=\s*[-+]?\\?\$?\d(?:[\d,./]*\d)?\s*(?:\\?%|[^\W\d_]+)?\s*$|[^\n]*\s*\Z)"
"""GSM8K's mark, which is a heading of Markdown too: a number and its unit follow it, or it begins the last line."""
MARKER = re.compile(
    rf"(?:{HEADED}|\banswer[\s*_]*(?:is|are|was|[:\uff1a=])|答案[\s*_]*[是为為:\uff1a=])"
    r"(?!\s*(?:above|below|calculated|clear|correct|derived|found|helpful|obtained|right|useful|wrong)\b)"
    r"(?:\n\s*[-\u2022]\s+|[\s*_:\uff1a]|\\\[|\$\$)*(?:(?:option|choice|equal to|therefore)\s+)?",
    re.IGNORECASE | re.MULTILINE,
)
"""Markers before an answer; the text after the last one counts, to the end of the sentence or line."""
SENTENCE_END = re.compile(
    r"(?<!\b(?:Dr|Mr|Ms))(?<!\bMrs)[.!?](?=\s|$)|[\u3002\uff01\uff1f\n]|,\s+(?:as|because|since|so|which)\s"
)
END = re.compile(r"(?:</s>|<\|\w{1,40}\|>|\\\]|\$\$|```)\Z")
"""Text that may follow the last words of a completion: end tokens, closed formulas and code."""
BULLET = re.compile(r"[-\u2022]\s+")

WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
"""A word set as text; alone in a box, it is the word that counts."""
EMPHASIS = re.compile(r"(?:\*\*|__)(?=\S)(.+?)(?<=\S)(?:\*\*|__)")

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
    if tags := list(re.finditer(r"<answer>", text, re.IGNORECASE)):
        answer, *closed = re.split(r"</answer>", text[tags[-1].end() :], maxsplit=1, flags=re.IGNORECASE)
        return (answer.strip() or None) if closed else None
    return (text.strip() if whole_text else _stated(text)) or None


def in_context(prompt: str, completion: str) -> str:
    """A completion, behind the `<think>` that its prompt leaves open: chat templates of reasoning models end with one."""
    return f"<think>{completion}" if prompt.rstrip().endswith("<think>") else completion


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` of a text, by counting braces; None without a box, or if it is empty or not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes or boxes[-1][1] is None:
        return None
    depth, start = 1, boxes[-1].end()
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace does not count
        if depth == 0:
            return text[start : brace.start()].strip() or None
    return None


def _last_match(pattern: str, completion: str) -> str | None:
    matches = re.findall(pattern, completion)
    return (matches[-1].strip() or None) if matches else None


def _after_thinking(completion: str) -> str:
    """Text after the reasoning; empty if that is not closed."""
    _, closed, after = completion.rpartition("</think>")
    return after if closed or "<think>" not in after else ""


def _stated(text: str) -> str:
    """The sentence after the last marker, or the last line."""
    text = text.rstrip()
    while end := END.search(text[-50:]):
        text = text[: -len(end[0])].rstrip()
    text = EMPHASIS.sub(r"\1", text)
    markers = list(MARKER.finditer(text))
    if markers:
        return SENTENCE_END.split(text[markers[-1].end() :], maxsplit=1)[0].strip(AROUND)
    return BULLET.sub("", text.rpartition("\n")[2].strip(AROUND), count=1)
