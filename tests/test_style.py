"""Plain technical English in the sources: the part of the rule in CONTRIBUTING.md that a machine can check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src/topd"
NOT_DONE = re.compile(r"(serve|trackers)/.*")
"""Files that do not follow the rule yet."""

FIRST_WORD = re.compile(r"(What|How|Whether|Nothing|Those|Told|Asked|Where|Who|When|Whatever|Whoever)\b")
PHRASES = re.compile(
    r"\btold of\b|\bis well\b|well again|\banew\b|\bmend(s|ed|ing)?\b|of (its|their) own\b|\basked for\b|\bleft alone\b"
    r"|\bat hand\b|\bask(ed|s)? again|\blaid over\b|\bmakes of\b|(?<!there )\b(is|are) no (?!longer|more|less|larger|other)",
    re.IGNORECASE,
)
"""Phrases that have a standard word: reported, healthy, regenerate, fix, separate, requested, skipped, available, overlay."""


def violations(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if FIRST_WORD.match(node.value.value.strip()):
                yield f"{node.lineno}: a docstring begins with a noun or a verb: {node.value.value.strip().splitlines()[0]}"
        elif (isinstance(node, ast.Name) and node.id == "found") or (isinstance(node, ast.arg) and node.arg == "found"):
            yield f"{node.lineno}: `found` names nothing"
    for number, line in enumerate(source.splitlines(), 1):
        if phrase := PHRASES.search(line):
            yield f"{number}: {phrase[0]!r} has a standard word: {line.strip()}"


FILES = [path for path in sorted(SOURCES.rglob("*.py")) if not NOT_DONE.fullmatch(path.relative_to(SOURCES).as_posix())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_sources_are_in_plain_technical_english(path: Path) -> None:
    assert list(violations(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""What it returns."""',
        "def f():\n    '''\n    Whether it is.'''",
        "x = 1\n'''How many.'''",
        "found = 1",
        "def f(found): ...",
    ],
)
def test_a_violation_is_seen(source: str) -> None:
    assert len(list(violations(source))) == 1


def test_a_phrase_is_seen() -> None:
    assert [bool(list(violations(f"# {text}"))) for text in ("it is no file", "there is no file", "written anew")] == [
        True,
        False,
        True,
    ]
