"""Lines for a terminal or a pipe: segments as rich text, tables that keep their columns, a console that ends quietly.

Nothing here parses markup: what a model wrote reaches the terminal as plain text made of segments (report/tokens.py).
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from topd.report.tokens import Shown, show_text
from topd.run.progress import SteadyConsole

SPACE = "\u2423"
LINE_END = "\u23ce"
_MARK = Style(italic=True, underline=True)


def open_console() -> Console:
    """Standard output. A pipe gets whole lines and no escape codes; characters that it cannot encode are spelled out."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return SteadyConsole(soft_wrap=True, highlight=False, markup=False, emoji=False)


def token_text(shown: Shown, style: Style | str = "", *, lines: bool = False) -> Text:
    """Segments as text. On one line with spaces that can be seen; with `lines`, as prose, line ends shown and kept."""
    text = Text(no_wrap=not lines)
    for segment in shown:
        match segment.kind:
            case "space":
                text.append(segment.text if lines else SPACE * len(segment.text), style)
            case "newline":
                text.append((LINE_END + "\n" if lines else LINE_END) * len(segment.text), style)
            case "mark":
                text.append(f"<{segment.text}>", Style.combine([Style.parse(style) if isinstance(style, str) else style, _MARK]))
            case "text":
                text.append(segment.text, style)
    return text


def plain_text(text: object, *, lines: bool = False) -> Text:
    """Any value as text without hidden or control characters; spaces stay spaces."""
    joined = token_text(show_text(str(text)), lines=True)
    return joined if lines else Text(joined.plain.replace("\n", ""))


def print_block(console: Console, text: Text, *, label: str = "", indent: int = 4) -> None:
    """Prose behind a bold label, and indented: wrapped to a terminal, whole lines in a pipe."""
    lines = text.wrap(console, max(console.width - indent, 8), overflow="fold") if console.is_terminal else text.split("\n")
    for i, line in enumerate(lines or [Text()]):
        head = label if i == 0 else ""
        console.print(Text().append(head, "bold").append(" " * max(indent - cell_len(head), 0)).append_text(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`heading` may have two lines. All columns are aligned to the right but the last, which has the text."""

    heading: str
    width: int = 0


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Text | str]], *, indent: int = 2) -> None:
    """A heading and one line per row. Only the last column is cut, and only on a terminal that is too narrow for it."""
    headings = [["", *column.heading.split("\n")][-2:] for column in columns]
    widths = [
        max([column.width, *(len(part) for part in heading), *(_cells(row[i]) for row in rows)])
        for i, (column, heading) in enumerate(zip(columns, headings, strict=True))
    ]
    gap = 1 if console.is_terminal and console.width < sum(widths[:-1]) + 2 * len(widths) + 24 else 2
    taken = indent + sum(widths[:-1]) + gap * (len(widths) - 1)
    room = max(console.width - taken - 1, 4) if console.is_terminal else None
    for level in (0, 1):
        if any(heading[level] for heading in headings):
            line = _line([heading[level] for heading in headings], widths, gap, indent, None)
            line.stylize("bold")
            console.print(line)
    for row in rows:
        console.print(_line(row, widths, gap, indent, room))


def _cells(cell: Text | str) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def _line(cells: Sequence[Text | str], widths: Sequence[int], gap: int, indent: int, room: int | None) -> Text:
    line = Text(" " * indent, no_wrap=True)
    for cell, width in zip(cells[:-1], widths, strict=False):
        line.append(" " * (width - _cells(cell)))
        line.append(cell) if isinstance(cell, str) else line.append_text(cell)
        line.append(" " * gap)
    last = Text(cells[-1]) if isinstance(cells[-1], str) else cells[-1].copy()
    if room is not None:
        last.truncate(room, overflow="ellipsis")
    line.append_text(last)
    line.rstrip()
    return line
