"""Output of `topd rescore`: changed settings, difference of the credit in total and by step, most changed tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from topd.report.rescoring.difference import PAIRS, SINGLES, ChangedToken, OldNew, Rescore, Row, changes_in_words, written
from topd.report.scales import scale_of, signed
from topd.report.stored import StoredRun, read_run
from topd.report.terminal import Column, open_console, plain_text, print_block, print_table, token_text
from topd.report.tokens import Texts

_LABEL = 12


def show(path: Path | str, rescore: Rescore, console: Console | None = None) -> None:
    """Print a rescore of the run at `path`."""
    console = console or open_console()
    run = read_run(path)
    for label, value in _facts(run, rescore).items():
        print_block(console, plain_text(value), label=label, indent=_LABEL)
    if rescore["same"]:
        console.print(
            "", Text("No difference: the changed settings do not change the credit of these rollouts.", "bold"), sep="\n"
        )
    for number in rescore["skipped_steps"]:
        run.step(number)  # notes why
    _show_overall(console, rescore["overall"])
    _show_steps(console, rescore["steps"])
    if rescore["top_changes"]:
        _show_changes(console, run, rescore["top_changes"])
    for problem in run.notes:
        console.print(Text("note: ").append_text(plain_text(problem)), style="yellow")


def _facts(run: StoredRun, rescore: Rescore) -> Mapping[str, str]:
    largest = rescore["largest_difference"]
    proof = "nothing: the rollouts hold no advantages to compare with"
    if largest is not None:
        apart = f", to within {largest:.1g}" if largest else " exactly"
        proof = f"the run's own settings give the stored advantages of its {rescore['num_tokens']:,} tokens back{apart}"
    return {
        "run": str(run.path),
        "changed": changes_in_words(rescore["changed"]) or "nothing: these are the run's own settings",
        "checked": proof,
        "saved": str(run.path / "rescores" / f"{rescore['name']}.json"),
        **({"left out": f"steps {rescore['skipped_steps']}"} if rescore["skipped_steps"] else {}),
    }


def _show_overall(console: Console, overall: Row) -> None:
    values: Mapping[str, Any] = overall
    tokens = f"{overall['compared']:,}"
    if overall["compared"] < overall["tokens"]:
        tokens += f" of {overall['tokens']:,}, whose numbers are finite"
    rows: list[list[Text | str]] = []
    for key, title in PAIRS.items():
        pair: OldNew = values[key]
        over = f"{overall['groups']:,} groups" if key == "silent_groups" else f"{tokens} tokens"
        rows.append([f"{title:<42}", written(key, pair["old"]), written(key, pair["new"]), over])
    rows += [[f"{title:<42}", "", written(key, values[key]), f"{tokens} tokens"] for key, title in SINGLES.items()]
    console.print("", Text("all steps", "bold"), sep="\n")
    columns = [
        Column(heading=f"{'':<42}"),
        Column(heading="old", width=7),
        Column(heading="new", width=7),
        Column(heading="over"),
    ]
    print_table(console, columns, rows)


def _show_steps(console: Console, rows: list[Row]) -> None:
    """Two tables, so that a terminal of 80 columns is wide enough: how alike the credits are, and what each of them is like."""
    alike: list[list[Text | str]] = []
    each: list[list[Text | str]] = []
    for row in rows:
        values: Mapping[str, Any] = row
        silent = [written("silent_groups", row["silent_groups"][side]) for side in ("old", "new")]
        alike.append(
            [
                *(str(row["step"]), f"{row['groups']:,}", *silent),
                *(written(key, values[key]) for key in SINGLES),
                f"{row['compared']:,}",
            ]
        )
        pairs = [written(key, values[key][side]) for key in PAIRS if key != "silent_groups" for side in ("old", "new")]
        each.append([str(row["step"]), *pairs[:-1], Text(f"{pairs[-1]:>6}")])
    headings = ("step", "groups", "silent\nold", "silent\nnew", "Pearson", "Spear-\nman", "cosine", "sign\nchanges", "tokens")
    console.print("", Text("step by step: how alike the two credits are", "bold"), sep="\n")
    print_table(console, [Column(heading=heading) for heading in headings], alike)
    pair_headings = ("reward", "std", "floor", "|adv.|", "top 1%")
    columns = [Column(heading=f"{name}\n{side}", width=6) for name in pair_headings for side in ("old", "new")]
    columns[-1] = Column(heading="top 1%\n   new")
    console.print(
        "", Text("step by step: mean reward, its std, tokens at its floor, mean |advantage|, top 1 %", "bold"), sep="\n"
    )
    print_table(console, [Column(heading="step"), *columns], each, indent=1)


def _show_changes(console: Console, run: StoredRun, changes: list[ChangedToken]) -> None:
    texts = Texts(run.vocabulary())
    scale = scale_of([np.array([token[key] for token in changes for key in ("old", "new")], np.float32)])
    rows: list[list[Text | str]] = []
    for token in changes:
        where = [str(token[key]) for key in ("step", "group", "rollout", "position")]
        numbers = [Text(signed(token[key]), scale.style(token[key])) for key in ("old", "new")]
        rows.append(
            [
                *where,
                *numbers,
                signed(token["new"] - token["old"]),
                str(token["token_id"]),
                token_text(texts.alone(token["token_id"])),
            ]
        )
    console.print("", Text(f"the {len(rows)} tokens whose advantage changes most", "bold"), sep="\n")
    headings = ("step", "group", "rollout", "pos", "old\nadv.", "new\nadv.", "change", "id", "token")
    print_table(console, [Column(heading=heading) for heading in headings], rows)
    console.print("", Text("see one with: topd explain RUN --step STEP --group GROUP --rollout ROLLOUT", "dim"), sep="\n")
