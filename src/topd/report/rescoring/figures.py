"""Results of `topd rescore` in a run folder, as tables and figures for the report. Its shape: `Rescore` in difference.py."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from topd.errors import first_line
from topd.report.charts import COLORS, figure_of
from topd.report.rescoring.difference import PAIRS, SINGLES, changes_in_words, parsed, written
from topd.report.stored import StoredRun
from topd.report.tokens import Texts, plain, show_text


def rescored(run: StoredRun, label: str) -> Iterator[dict[str, Any]]:
    """One entry per file: title, notes, table, tokens and charts. A file of another shape is noted as a problem of the run."""
    texts = Texts(run.vocabulary()) if run.rescores else Texts({})
    for at, content in enumerate(run.rescores):
        try:
            rescore = parsed(content)
        except ValueError as error:
            run.problems.append(f"a file in rescores/ could not be shown ({first_line(error)})")
        else:
            yield _entry(rescore, f"{label}-{at}", label, texts)


def _entry(rescore: Mapping[str, Any], key: str, label: str, texts: Texts) -> dict[str, Any]:
    changed = changes_in_words(rescore["changed"])
    overall = rescore["overall"]
    notes = [
        f"Over {overall['compared']:,} of {overall['tokens']:,} tokens in {len(rescore['steps'])} steps of {label}. "
        + ("The credit is exactly the same. " if rescore["same"] else "")
        + f"Made by topd {rescore['topd_version']}."
    ]
    return {
        "title": f"{label}: {rescore['name']}" + (f" ({changed})" if changed else ""),
        "notes": notes,
        "rows": [
            *((words, *(written(name, overall[name][side]) for side in ("old", "new"))) for name, words in PAIRS.items()),
            *((words, "", written(name, overall[name])) for name, words in SINGLES.items()),
        ],
        "tokens": [
            (
                token["step"],
                token["group"],
                token["rollout"],
                token["position"],
                plain(texts.alone(token["token_id"])),
                _shown(token["old"], ".3f"),
                _shown(token["new"], ".3f"),
            )
            for token in rescore["top_changes"]
        ],
        "charts": list(_charts(rescore, key, f"{label}: {plain(show_text(rescore['name']))}")),
    }


def _charts(rescore: Mapping[str, Any], key: str, title: str) -> Iterator[dict[str, Any]]:
    steps = [row["step"] for row in rescore["steps"]]
    lines = {name: [row[name] for row in rescore["steps"]] for name in SINGLES}
    mode = "lines+markers"
    traces = [
        go.Scatter(x=steps, y=series, mode=mode, name=words, line={"color": COLORS[at]})
        for at, (words, series) in enumerate(zip(SINGLES.values(), lines.values(), strict=True))
    ]
    unit = "correlation, cosine or share"
    by_step = [[step, *at] for step, at in zip(steps, zip(*lines.values(), strict=True), strict=True)]
    yield _chart(f"{key}-steps", f"{title}, step by step", unit, figure_of(unit, traces), ["step", *lines], by_step)
    edges, old, new = (rescore["histogram"][name] for name in ("edges", "old", "new"))
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    bars = [go.Bar(x=middles, y=counts, name=name) for name, counts in (("as trained", old), ("rescored", new))]
    for bar, color in zip(bars, COLORS, strict=False):
        bar.update(marker={"color": color, "opacity": 0.6})
    figure = figure_of("tokens", bars, x="advantage")
    figure["layout"] |= {"barmode": "overlay", "bargap": 0}
    rows = [[*ends, *counts] for ends, counts in zip(pairwise(edges), zip(old, new, strict=True), strict=True)]
    note = "The outermost bars also count what lies beyond them."
    columns = ["from", "to", "as trained", "rescored"]
    yield _chart(f"{key}-advantages", f"{title}, advantages", "tokens", figure, columns, rows, note)
    yield _joint(rescore["joint"], f"{key}-joint", title)


def _joint(joint: Mapping[str, Any], key: str, title: str) -> dict[str, Any]:
    """Old against new advantage as a map of counts, on a logarithmic colour scale."""
    counts = joint["counts"]
    x, y = ([(low + high) / 2 for low, high in pairwise(edges)] for edges in (joint["old_edges"], joint["new_edges"]))
    columns = [[row[j] for row in counts] for j in range(len(y))]
    heat = go.Heatmap(
        x=x,
        y=y,
        z=[[math.log10(count) if count else None for count in row] for row in columns],
        customdata=columns,
        hovertemplate="as trained %{x:.3f}, rescored %{y:.3f}: %{customdata} tokens<extra></extra>",
        colorscale="Cividis",
        showscale=False,
    )
    figure = figure_of("advantage, rescored", [heat], x="advantage, as trained")
    figure["layout"]["hovermode"] = "closest"
    rows = [[x[i], y[j], counts[i][j]] for i in range(len(x)) for j in range(len(y)) if counts[i][j]]
    note = "Every token by its advantage before and after; bright fields hold many. The outermost fields are open."
    return _chart(key, f"{title}, token by token", "tokens", figure, ["as trained", "rescored", "tokens"], rows, note)


def _chart(
    key: str, title: str, unit: str, figure: dict[str, Any], columns: list[str], rows: Sequence[Any], note: str = ""
) -> dict[str, Any]:
    entry = {"id": f"rescored-{key}", "section": "Rescored", "title": title, "unit": unit, "note": note, "summary": ""}
    return {**entry, "figure": figure, "columns": columns, "rows": list(rows)}


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
