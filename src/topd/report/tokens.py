"""Token ids as text that a person can see and that nothing can be smuggled through.

A token is bytes, and what the model writes is hostile input. Every token becomes a few segments: text that is safe to print as it
is, a visible space or line end, or a mark that spells out what has no harmless glyph (control characters, direction overrides,
bytes that are not UTF-8). Joined, the text segments are what the completion says.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Literal

Kind = Literal["text", "space", "newline", "mark"]

MAX_CHARACTERS = 200
"""Tokens that are longer as shown, marks spelled out, are cut, with a mark that says how long they are."""

_MAX_COMBINING = 4
"""More combining marks on one letter reach over the lines around it, so the others are spelled out."""

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class Segment:
    """`text` of a space or newline is the character itself; a mark is ASCII, such as U+202E or F0 9F."""

    kind: Kind
    text: str


Shown = tuple[Segment, ...]


class Texts:
    """The tokens of a run as segments."""

    def __init__(self, vocabulary: Mapping[int, tuple[bytes, bool]]) -> None:
        """`vocabulary`: token id -> (bytes, special), as run/vocabulary.py reads it."""
        self._vocabulary = vocabulary

    def is_special(self, token_id: int) -> bool:
        return token_id not in self._vocabulary or self._vocabulary[token_id][1]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of the token; its id in angle brackets if the vocabulary does not hold it."""
        known = self._vocabulary.get(token_id)
        return known[0] if known is not None else b"<%d>" % token_id

    def alone(self, token_id: int) -> Shown:
        """A token without its neighbours."""
        return _segments(self.bytes_of(token_id))

    def show(self, token_ids: Sequence[int]) -> list[Shown]:
        """One entry per token. A character whose bytes are spread over several tokens stands at the one that completes it; the
        others show their bytes."""
        shown = []
        pending, stacked = b"", 0
        for token_id in token_ids:
            raw = self.bytes_of(token_id)
            if self.is_special(token_id) or (raw.isascii() and not pending):
                segments, pending = _segments(raw), b""
            else:
                segments, pending = _continued(pending, raw)
            segments, stacked = _limited(segments, stacked)
            shown.append(segments)
        return shown


def plain(shown: Shown) -> str:
    """One token on one line: marks in angle brackets, a line end as an arrow."""
    return "".join({"mark": f"<{s.text}>", "newline": "\u23ce"}.get(s.kind, s.text) for s in shown)


def show_text(text: str) -> Shown:
    """Any string (a prompt, an answer) as segments."""
    return tuple(_merged(_characters(text.encode("utf-8", errors="surrogatepass"))))


def _continued(pending: bytes, raw: bytes) -> tuple[Shown, bytes]:
    """A token after unfinished bytes of earlier ones -> its segments, and the bytes that it leaves unfinished."""
    length = _needed(pending) - len(pending) if pending else 0
    head = pending + raw[:length] if pending else b""
    whole: Shown = ()
    if pending and _is_utf8(head):
        whole, raw = _segments(head), raw[length:]
    elif pending and _unfinished(head) == head and len(raw) < length:
        return (Segment("mark", _hex(raw)),) if raw else (), head
    rest = _unfinished(raw)
    return (*whole, *_segments(raw)), rest


def _limited(shown: Shown, before: int) -> tuple[Shown, int]:
    """A token after a letter with `before` combining marks -> its segments, those above the limit spelled out, and how many marks
    the letter has that it ends with."""
    if not shown:
        return shown, before
    first, last = shown[0].text, shown[-1].text
    leading, trailing = _combining(first), _combining(reversed(last))
    after = trailing + (before if len(shown) == 1 and trailing == len(last) else 0)
    if not leading or before + leading <= _MAX_COMBINING:
        return shown, after
    kept = max(0, _MAX_COMBINING - before)
    spelled = Segment("mark", " ".join(map(_name, first[kept:leading])))
    parts = (Segment("text", first[:kept]), spelled, Segment("text", first[leading:]))
    return (*(part for part in parts if part.text), *shown[1:]), after


def _combining(text: Iterable[str]) -> int:
    """Number of combining marks at the beginning."""
    return sum(1 for _ in takewhile(_combines, text))


def _combines(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me")


def _needed(start: bytes) -> int:
    """Length in bytes of the character that begins with these."""
    return 2 if start[0] < 0xE0 else 3 if start[0] < 0xF0 else 4


def _unfinished(raw: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    for size in range(1, min(3, len(raw)) + 1):
        tail = raw[-size:]
        if 0xC2 <= tail[0] <= 0xF4 and len(tail) < _needed(tail) and all(0x80 <= byte < 0xC0 for byte in tail[1:]):
            return tail
    return b""


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=100_000)
def _segments(raw: bytes) -> Shown:
    return tuple(_merged(_cut(raw, MAX_CHARACTERS)))


def _cut(raw: bytes, limit: int) -> Iterator[Segment]:
    most = 4 * limit  # no character has more bytes
    shown = 0
    for segment in _characters(raw[:most]):
        shown += len(segment.text) + (segment.kind == "mark")  # the space between marks
        if shown > limit:
            break
        yield segment
    if shown > limit or len(raw) > most:
        yield Segment("mark", f"... {len(raw):,} bytes")


def _characters(raw: bytes) -> Iterator[Segment]:
    """One segment per character or undecodable byte."""
    text = raw.decode(errors="surrogateescape")
    joins = any(character not in _JOINERS and unicodedata.category(character) not in _HIDDEN for character in text)
    combining = 0
    for character in text:
        category = unicodedata.category(character)
        combining = combining + 1 if _combines(character) else 0
        if "\udc80" <= character <= "\udcff":
            yield Segment("mark", f"{ord(character) - 0xDC00:02X}")
        elif character == "\n":
            yield Segment("newline", character)
        elif category == "Zs":
            yield Segment("space", character) if character == " " else Segment("mark", _name(character))
        elif (category in _HIDDEN and not (joins and character in _JOINERS)) or combining > _MAX_COMBINING:
            yield Segment("mark", _name(character))
        else:
            yield Segment("text", character)


def _name(character: str) -> str:
    return {"\t": "TAB", "\r": "CR", "\x1b": "ESC", "\0": "NUL"}.get(character, f"U+{ord(character):04X}")


def _hex(raw: bytes) -> str:
    return " ".join(f"{byte:02X}" for byte in raw)


def _merged(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Neighbours of one kind as one; marks are joined by a space."""
    for kind, neighbours in groupby(segments, key=lambda segment: segment.kind):
        yield Segment(kind, (" " if kind == "mark" else "").join(segment.text for segment in neighbours))
