"""Memory of a JSON body as Python objects, estimated from its bytes before it is parsed."""

TEXT, WIDE_TEXT = 2, 8
"""Bytes in memory per byte of text, besides the body itself; wide where one character can make a whole string wide."""

OBJECTS = ((b"{", 240), (b"[", 88), (b",", 40), (b":", 128), (b'"', 32))
"""Bytes in memory of the object that each character begins or separates, slightly above CPython's use; the parser lists the pairs
of an object before it builds the dict."""


def parsed_bytes(body: bytes | bytearray) -> int:
    """Upper bound of the memory of `json.loads(body)` while it runs; 31 MB of text take 90 MB, as `[[],[],...]` 1.4 GB."""
    wide = not body.isascii() or b"\\u" in body
    return len(body) * (1 + (WIDE_TEXT if wide else TEXT)) + sum(body.count(mark) * cost for mark, cost in OBJECTS)
