"""Tokens as text: what is valid and printable is shown as it is, and nothing else reaches a page or a terminal unspelled."""

import codecs
import time
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from topd.report.tokens import MAX_CHARACTERS, Segment, Shown, Texts, plain, show_text

HARMFUL = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
JOINERS = "\u200c\u200d"
EMOJI = "\U0001f469\u200d\U0001f680"
"""An astronaut: woman, joiner, rocket."""

STACKED = 4
"""Combining marks that a letter may have."""

printable = st.characters(exclude_categories=["C", "Z", "M"]) | st.sampled_from(" \n")
pieces = st.binary(max_size=6) | st.text(max_size=3).map(str.encode) | st.sampled_from([b"", b"\xe2\x82", b"\xac", b"\xcc\xb4"])


def texts(*words: bytes, special: Sequence[int] = ()) -> Texts:
    return Texts({i: (word, i in special) for i, word in enumerate(words)})


def shown(*words: bytes, special: Sequence[int] = ()) -> list[Shown]:
    return texts(*words, special=special).show(range(len(words)))


def said(tokens: Sequence[Shown]) -> str:
    return "".join(segment.text for token in tokens for segment in token if segment.kind != "mark")


def marks(token: Shown) -> list[str]:
    return [segment.text for segment in token if segment.kind == "mark"]


def length(token: Shown) -> int:
    return sum(len(segment.text) for segment in token)


def text(words: str) -> Segment:
    return Segment("text", words)


def mark(words: str) -> Segment:
    return Segment("mark", words)


def assert_harmless(token: Shown) -> None:
    for segment in token:
        assert segment.text
        if segment.kind == "space":
            assert set(segment.text) == {" "}
        elif segment.kind == "newline":
            assert set(segment.text) == {"\n"}
        elif segment.kind == "mark":
            assert segment.text.isascii()
            assert segment.text.isprintable()
        else:
            assert not [char for char in segment.text if unicodedata.category(char) in HARMFUL and char not in JOINERS]


def longest_stack(words: str) -> int:
    longest = run = 0
    for char in words:
        run = run + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        longest = max(longest, run)
    return longest


@given(
    st.lists(st.tuples(st.binary(max_size=300) | pieces, st.booleans()), max_size=8), st.lists(st.integers(-2, 9), max_size=12)
)
@example([(b"\xf0\x9f", False), (b"\x91", False), (b"", False), (b"\xa9", False)], [0, 1, 2, 3])
@example([("\u202e\u2066\ud7ff\ue000\uffff".encode(), False)], [0])
def test_any_bytes_in_any_order_are_harmless_and_short(entries: list[tuple[bytes, bool]], ids: list[int]) -> None:
    vocabulary = Texts(dict(enumerate(entries)))
    tokens = vocabulary.show(ids)
    assert len(tokens) == len(ids)
    for token_id, token in zip(ids, tokens, strict=True):
        for each in (token, vocabulary.alone(token_id)):
            assert_harmless(each)
            assert length(each) <= MAX_CHARACTERS + len(" ... 999,999 bytes") + 5
        assert (plain(token) == "") == (token == ())


@given(st.text(printable, max_size=60), st.lists(st.integers(0, 4), max_size=100))
@example("a\U0001f680é漢", [1] * 12)
@example("\U0001f680\U0001f680", [3, 1, 2, 2])
def test_valid_text_is_shown_whole_each_character_where_it_is_complete(words: str, cuts: list[int]) -> None:
    raw, parts = words.encode(), []
    for size in cuts:
        parts.append(raw[:size])
        raw = raw[size:]
    parts.append(raw)
    tokens = shown(*parts)
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert [said([token]) for token in tokens] == [decoder.decode(part) for part in parts]
    assert said(tokens) == words


@given(st.lists(pieces, max_size=12))
@example([b"\xe0", b"\x80", b"\x80a"])
@example([b"\xed\xa0", b"\x80", b"\xf4", b"\x90\x80\x80"])
@example([b"\xf0\x9f", b"\xe2", b"\x82\xac"])
def test_of_broken_text_what_is_valid_is_shown(parts: list[bytes]) -> None:
    """Python's own decoder says what is valid. Joiners and stacked marks depend on their neighbours: other tests look at them."""
    valid = b"".join(parts).decode(errors="ignore")

    def kept(char: str) -> bool:
        return char in " \n" or (unicodedata.category(char) not in HARMFUL and unicodedata.category(char) not in ("Mn", "Me"))

    assert "".join(filter(kept, said(shown(*parts)))) == "".join(filter(kept, valid))


@pytest.mark.parametrize("character", ["é", "漢", "\U0001f680"])
def test_a_character_over_several_tokens_stands_at_the_last_and_the_others_show_their_bytes(character: str) -> None:
    raw = character.encode()
    tokens = shown(*(raw[i : i + 1] for i in range(len(raw))))
    assert tokens == [*((mark(f"{byte:02X}"),) for byte in raw[:-1]), (text(character),)]


def test_a_token_may_end_one_character_and_begin_another() -> None:
    assert shown(b"a\xc3", b"\xa9\xe6\xbc", b"\xa2!") == [
        (text("a"), mark("C3")),
        (text("é"), mark("E6 BC")),
        (text("漢"), text("!")),
    ]


def test_a_special_token_ends_an_unfinished_character() -> None:
    assert shown(b"\xe6\xbc", b"<eos>", b"\xa2", special=[1]) == [(mark("E6 BC"),), (text("<eos>"),), (mark("A2"),)]
    assert shown(b"<x\xe6\xbc", b"\xa2", special=[0]) == [(text("<x"), mark("E6 BC")), (mark("A2"),)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"\xe6\xbc", b"a"], [(mark("E6 BC"),), (text("a"),)]),
        ([b"\xe6", b"\xbc", b"\xc3", b"\xa9"], [(mark("E6"),), (mark("BC"),), (mark("C3"),), (text("é"),)]),
        ([b"\xc0\xaf"], [(mark("C0 AF"),)]),
        ([b"\xe0", b"\x80\xaf"], [(mark("E0"),), (mark("80 AF"),)]),
        ([b"\xed", b"\xa0", b"\x80"], [(mark("ED"),), (mark("A0"),), (mark("80"),)]),
        ([b"\xf4\x90", b"\x80\x80"], [(mark("F4 90"),), (mark("80 80"),)]),
        ([b"\xff", b"\x80"], [(mark("FF"),), (mark("80"),)]),
        ([b"ab\xf0\x9f\x9a"], [(text("ab"), mark("F0 9F 9A"))]),
        ([b"\xc3", b"", b"\xa9"], [(mark("C3"),), (), (text("é"),)]),
    ],
    ids=["interrupted", "begun anew", "overlong", "overlong split", "surrogate", "beyond Unicode", "no start", "at end", "empty"],
)
def test_what_is_no_utf8_is_shown_as_bytes(parts: list[bytes], expected: list[Shown]) -> None:
    assert shown(*parts) == expected


@pytest.mark.parametrize(
    ("character", "spelled"),
    [
        *(("\t", "TAB"), ("\r", "CR"), ("\x1b", "ESC"), ("\0", "NUL"), ("\x7f", "U+007F"), ("\x9b", "U+009B")),
        *(("\u202e", "U+202E"), ("\u2066", "U+2066"), ("\u200b", "U+200B"), ("\ufeff", "U+FEFF"), ("\xad", "U+00AD")),
        *(("\u2028", "U+2028"), ("\xa0", "U+00A0"), ("\u3000", "U+3000"), ("\ue000", "U+E000"), ("\U000e0041", "U+E0041")),
        *(("\u0378", "U+0378"), ("\U0010ffff", "U+10FFFF")),
    ],
)
def test_what_has_no_harmless_glyph_is_spelled_out(character: str, spelled: str) -> None:
    assert shown(f"a{character}b".encode()) == [(text("a"), mark(spelled), text("b"))]
    assert show_text(f"{character}b") == (mark(spelled), text("b"))


def test_spaces_and_line_ends_are_segments_of_their_own() -> None:
    assert shown(b"  a\n\nb ") == [
        (Segment("space", "  "), text("a"), Segment("newline", "\n\n"), text("b"), Segment("space", " "))
    ]
    assert plain(shown(b" a\n\x1b\x07")[0]) == " a\u23ce<ESC U+0007>"
    assert "".join(plain(each) for each in shown(b"a\n", b"\xff")) == "a\u23ce<FF>"


def test_joiners_are_kept_within_an_emoji_and_spelled_out_alone() -> None:
    assert shown(EMOJI.encode()) == [(text(EMOJI),)]
    persian = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert shown(persian.encode()) == [(text(persian),)]
    assert shown("\u200d".encode(), "\u200c\u200d".encode()) == [(mark("U+200D"),), (mark("U+200C U+200D"),)]
    assert shown("\u200d\u202e".encode()) == [(mark("U+200D U+202E"),)]


def test_more_combining_marks_than_a_letter_carries_are_spelled_out() -> None:
    zalgo = "Z" + "\u0334" * 6 + "e" + "\u0301" * 4
    assert shown(zalgo.encode()) == [(text("Z" + "\u0334" * 4), mark("U+0334 U+0334"), text("e" + "\u0301" * 4))]
    assert show_text("e\u20dd\u20dd\u20dd\u20dd\u20ddx")[1] == mark("U+20DD")


def test_combining_marks_of_several_tokens_count_together() -> None:
    above, below, two = ("\u0301".encode(), "\u0330".encode(), "\u0334\u0335".encode())
    tokens = shown(b"Z", above, two, b"", below + above + b"x", below, b"y")
    assert tokens[:4] == [(text("Z"),), (text("\u0301"),), (text("\u0334\u0335"),), ()]
    assert tokens[4:] == [(text("\u0330"), mark("U+0301"), text("x")), (text("\u0330"),), (text("y"),)]
    assert [marks(token) for token in shown(b"Z", *[above] * 6)] == [[]] * 5 + [["U+0301"]] * 2


@given(st.lists(st.text(st.sampled_from("Z\u0301\u0334\u20dd \u1ab0"), max_size=7).map(str.encode), max_size=12))
def test_no_letter_has_more_marks_than_the_limit(parts: list[bytes]) -> None:
    pieces = ["\0" if segment.kind == "mark" else segment.text for token in shown(*parts) for segment in token]
    assert longest_stack("".join(pieces)) <= STACKED


@pytest.mark.parametrize(
    "content", [b"x", b"\x01", b"\xff", "漢".encode(), "\U0001f680".encode(), "\u0301".encode(), b" ", b"\n"]
)
def test_a_long_token_is_cut_at_once_and_says_how_long_it_is(content: bytes) -> None:
    began = time.perf_counter()
    [token] = shown(content * 1_000_000)
    assert time.perf_counter() - began < 10
    said = f"... {len(content) * 1_000_000:,} bytes"
    assert token[-1].kind == "mark"
    assert token[-1].text.endswith(said)
    assert MAX_CHARACTERS - 8 <= length(token) - len(said) <= MAX_CHARACTERS + 1


@pytest.mark.parametrize("character", ["x", "漢", "\U0001f680"])
def test_a_token_of_just_the_limit_is_whole(character: str) -> None:
    whole, longer = (character * size for size in (MAX_CHARACTERS, MAX_CHARACTERS + 1))
    assert shown(whole.encode()) == [(text(whole),)]
    assert shown(longer.encode()) == [(text(whole), mark(f"... {len(longer.encode())} bytes"))]


def test_marks_count_as_long_as_they_are_shown() -> None:
    [token] = shown(b"\x01" * 200)
    assert token == (mark(" ".join(["U+0001"] * 28) + " ... 200 bytes"),)


def test_a_token_without_an_entry_is_shown_by_its_id_and_counts_as_special() -> None:
    found = texts(b"a", b"<s>", special=[1])
    assert found.show([0, 7, 1]) == [(text("a"),), (text("<7>"),), (text("<s>"),)]
    assert [found.is_special(token_id) for token_id in (0, 1, 7)] == [False, True, True]
    assert found.bytes_of(7) == b"<7>"
    assert found.alone(0) == (text("a"),)


@given(st.text(st.characters(exclude_categories=[]), max_size=80))
@example("\ud800a\udfff")
def test_any_string_is_shown_harmlessly_and_whole(words: str) -> None:
    found = show_text(words)
    assert_harmless(found)
    assert sum(segment.text.startswith("...") for segment in found) <= words.count("...")
    for char in words:
        if unicodedata.category(char) not in {*HARMFUL, "Mn", "Me"}:
            assert char in said([found])


def test_lone_surrogates_are_shown_as_bytes() -> None:
    assert show_text("\ud800a\udfff") == (mark("ED A0 80"), text("a"), mark("ED BF BF"))


def test_a_prompt_is_never_cut() -> None:
    prompt = "ab" * 10_000
    assert show_text(prompt) == (text(prompt),)
    assert plain(show_text("\x01" * 1000)).count("U+0001") == 1000
