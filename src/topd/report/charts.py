"""The curves of a report as plotly figures, each with its numbers as a table.

Nothing is smoothed. Bands and bars are the intervals and percentiles that the run recorded. Every metric has a chart.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from topd.report.chart_table import CHARTS, PER_TEACHER, UNITS, Chart
from topd.report.credit import floor_of
from topd.report.stored import StoredRun, names
from topd.run.catalogue import declared_name

Row = list[Any]

COLORS = ("#1a7fc1", "#d55e00", "#009e73", "#b8568f", "#9a7500", "#8f63c9", "#7a7f87", "#a8553a")
"""After Okabe and Ito's palette for every kind of colour vision; each has a contrast of 3 to 1 to a light and a dark page."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
"""Marks of the runs, so that colour is not all that tells them apart."""

MAX_POINTS = 2000
"""Of longer runs only every n-th step is drawn. Nothing is averaged."""

_MAX_MARKERS = 60
"""Longer curves are drawn without a mark at every step."""

_DASHES = ("solid", "dash", "dot", "dashdot")
_DASH_WORDS = ("solid", "dashed", "dotted", "dashes and dots")
AXES = {"step": "step", "updates": "policy_version", "tokens": "tokens/total"}
"""Axes that curves can be drawn over, and the metric behind it; hours are summed from seconds/step."""


def charts(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """All charts with something to show: id, section, title, unit, note, plotly figure, and the table of its numbers."""
    shown = [_Shown(run, label, i) for i, (run, label) in enumerate(zip(runs, names(runs), strict=True))]
    listed = (*CHARTS, *_per_teacher(runs), *_others(runs))
    return [*_accuracy(shown), *(entry for chart in listed for entry in _chart(chart, shown))]


def legend(labels: Sequence[str]) -> list[dict[str, str]]:
    """Colour and mark of every run, which all charts share."""
    marks = ((COLORS[i % len(COLORS)], SYMBOLS[i % len(SYMBOLS)]) for i in range(len(labels)))
    return [{"name": label, "color": color, "symbol": symbol} for label, (color, symbol) in zip(labels, marks, strict=True)]


class _Shown:
    """A run as its curves show it: at most MAX_POINTS of its steps."""

    def __init__(self, run: StoredRun, label: str, index: int) -> None:
        self.run, self.label, self.index = run, label, index
        self.every = max(1, math.ceil(len(run.metrics) / MAX_POINTS))
        self.steps = self._thinned([row["step"] for row in run.metrics])

    def series(self, metric: str) -> list[float | None]:
        return self._thinned(self.run.series(metric))

    def _thinned(self, values: list[Any]) -> list[Any]:
        kept = values[:: self.every]
        return kept if not values or (len(values) - 1) % self.every == 0 else [*kept, values[-1]]


def _chart(chart: Chart, runs: Sequence[_Shown]) -> Iterator[dict[str, Any]]:
    """The chart's entry; none if no run has anything to show."""
    traces: list[Any] = []
    rows: list[Row] = []
    for run in runs:
        lines = {metric: run.series(metric) for metric in chart.lines}
        if any((x or chart.always) and x is not None for series in lines.values() for x in series):
            traces += _traces(chart, lines, run, len(runs) > 1)
            rows += [[run.label, step, *at] for step, at in zip(run.steps, zip(*lines.values(), strict=True), strict=True)]
    if rows:
        columns = ["run", "step", *(f"{metric} ({UNITS.get(declared_name(metric), 'unknown')})" for metric in chart.lines)]
        figure = figure_of(chart.axis, traces, log=chart.log, stacked=chart.stacked, num_runs=len(runs))
        yield _entry(chart, figure, columns, rows, _summary(rows, list(chart.lines.values())), _notes(chart, runs))


def _notes(chart: Chart, runs: Sequence[_Shown]) -> str:
    """Notes under a chart: which dash is which line, and what is not drawn."""
    words = [chart.note] if chart.note else []
    if chart.id == "token-reward":
        floors = {floor_of(run.run) for run in runs}
        words += [f"It is never below {floor[0]:.3g}, {floor[1]}." for floor in floors if floor and len(floors) == 1]
    if len(runs) > 1 and len(chart.lines) > 1:
        styles = ("thin", "thin", "thick") if chart.band else _DASH_WORDS
        words.append(", ".join(f"{style}: {name}" for style, name in zip(styles, chart.lines.values(), strict=False)) + ".")
    if (every := max(run.every for run in runs)) > 1:
        words.append(f"Of long runs one in {every} steps is drawn.")
    return " ".join(words)


def axes(runs: Sequence[StoredRun]) -> list[dict[str, list[float | None]]]:
    """Per run the position of every recorded step on every axis, for a reader who compares by tokens or time."""
    positions_of: list[dict[str, list[float | None]]] = []
    for run in runs:
        positions = {name: run.series(metric) for name, metric in AXES.items()}
        total = 0.0
        hours: list[float | None] = []
        for seconds in run.series("seconds/step"):
            total += seconds or 0.0
            hours.append(total / 3600)
        positions_of.append({**positions, "hours": hours})
    return positions_of


def _entry(chart: Chart, figure: dict[str, Any], columns: list[str], rows: list[Row], summary: str, note: str) -> dict[str, Any]:
    return {
        "id": chart.id,
        "section": chart.section,
        "title": chart.title,
        "unit": chart.unit,
        "note": note,
        "summary": summary,
        "figure": figure,
        "columns": columns,
        "rows": rows,
    }


def _summary(rows: Sequence[Row], lines: Sequence[str], first_column: int = 2) -> str:
    """First and last number of every line in words, for those who do not see the curve."""
    words = []
    runs = list(dict.fromkeys(row[0] for row in rows))
    for name in runs:
        for at, line in enumerate(lines, first_column):
            points = [(row[1], row[at]) for row in rows if row[0] == name and row[at] is not None]
            if points:
                (first, before), (last, after) = points[0], points[-1]
                of = " ".join([*([f"{name}:"] if len(runs) > 1 else []), *([line] if len(lines) > 1 else [])])
                change = f"{before:.4g} at step {first}" + (f", {after:.4g} at step {last}" if last != first else "")
                words.append(f"{of} {change}".strip())
    return "; ".join(words) + "." if words else ""


def _per_teacher(runs: Sequence[StoredRun]) -> Iterator[Chart]:
    """With several teachers: gap, reward, groups and dropped groups of each."""
    tables = [run.setting("teachers") for run in runs]
    teachers = sorted({name for table in tables if isinstance(table, Mapping) for name in table})
    for what, title in PER_TEACHER.items() if teachers else ():
        lines = {f"teacher/{name}/{what}": name for name in teachers}
        yield Chart(id=f"teachers-{what}", section="Teacher", title=title, lines=lines, always=what != "dropped_groups")


def _others(runs: Sequence[StoredRun]) -> Iterator[Chart]:
    """Numbers that the run recorded under names that this version does not know."""
    known = {metric for chart in CHARTS for metric in chart.lines} | set(AXES.values())
    recorded = dict.fromkeys(name for run in runs for row in run.metrics[:1] + run.metrics[-1:] for name in row)
    for at, name in enumerate(name for name in recorded if declared_name(name) not in UNITS and name not in known):
        yield Chart(id=f"other-{at}", section="Other", title=name, lines={name: name}, note="This version does not know it.")


def _traces(chart: Chart, lines: Mapping[str, list[float | None]], run: _Shown, several: bool) -> Iterator[Any]:
    """The lines of one run: a colour for every run and a dash for every line, or, with a single run, a colour for every line."""
    index, label, steps = run.index, run.label, run.steps
    for at, (metric, series) in enumerate(lines.items()):
        color = COLORS[(index if several or chart.band else at) % len(COLORS)]
        name = chart.lines[metric]
        if several:
            name = f"{label}: {name}" if len(lines) > 1 else label
        common = {"x": steps, "meta": {"run": index}, "legendgroup": str(index) if several else metric}
        if chart.stacked and not several:
            is_rest = metric == "seconds/step"
            y = _rest(lines) if is_rest else series
            yield go.Bar(y=y, marker={"color": color}, name="rest of the step" if is_rest else html.escape(name), **common)
            continue
        is_edge = chart.band and at < 2
        dash = _DASHES[at % len(_DASHES)] if several and not chart.band else "solid"
        yield go.Scatter(
            y=series,
            name=html.escape(name),
            mode="lines" if is_edge or len(steps) > _MAX_MARKERS else "lines+markers",
            line={"color": color, "width": 0.5 if is_edge else 2, "dash": dash},
            marker={"size": 6 if several else 5, "symbol": SYMBOLS[index % len(SYMBOLS)]},
            fill="tonexty" if is_edge and at == 1 else None,
            fillcolor=_faint(color),
            showlegend=not is_edge,
            **common,
        )


def _rest(lines: Mapping[str, list[float | None]]) -> list[float | None]:
    """Seconds of a step that no phase accounts for."""
    *phases, whole = lines.values()
    parts = [sum(phase[i] or 0.0 for phase in phases) for i in range(len(whole))]
    return [None if total is None else max(0.0, total - part) for total, part in zip(whole, parts, strict=True)]


def _accuracy(runs: Sequence[_Shown]) -> Iterator[dict[str, Any]]:
    """One chart per benchmark: the student over the steps with its intervals; the teacher as a level."""
    several = len(runs) > 1
    for benchmark in dict.fromkeys(row["benchmark"] for run in runs for row in run.run.evaluations):
        traces: list[Any] = []
        rows: list[Row] = []
        for run in runs:
            own = sorted((row for row in run.run.evaluations if row["benchmark"] == benchmark), key=lambda row: row["step"])
            for who in ("student", "teacher"):
                points = [row for row in own if row["model"] == who]
                if points:
                    name = f"{run.label}: {who}" if several else who
                    color = COLORS[(run.index if several else who == "teacher") % len(COLORS)]
                    traces += _interval(points, name, run.index, color, max(row["step"] for row in own))
                for row in points:
                    rows.append([run.label, row["step"], who, row["avg_at_k"], *row["ci95"], row.get("k"), row.get("problems")])
        columns = ["run", "step", "model", "avg@k", "interval low", "interval high", "k", "problems"]
        yield {
            "id": f"accuracy-{benchmark}",
            "section": "Result",
            "title": f"Accuracy on {benchmark}",
            "unit": "avg@k, share",
            "note": "avg@k on held-out problems, with 95 % intervals over the problems"
            + ("; dashed: the teacher." if several else "."),
            "summary": _summary([row for row in rows if row[2] == "student"], ["avg@k"], first_column=3),
            "figure": figure_of("avg@k, share", traces, num_runs=len(runs)),
            "columns": columns,
            "rows": rows,
        }


def _interval(points: Sequence[Mapping[str, Any]], name: str, run: int, color: str, last: int) -> Iterator[Any]:
    """A line with a bar at every evaluation and a band between; a single one (the teacher) as a level over the whole run."""
    single = len(points) == 1 and points[0]["model"] == "teacher" and last > 0
    shown = [points[0], {**points[0], "step": last}] if single else list(points)
    steps = [row["step"] for row in shown]
    low, high = ([row["ci95"][end] for row in shown] for end in (0, 1))
    middle = [row["avg_at_k"] for row in shown]
    above, below = ([abs(end - x) for end, x in zip(ends, middle, strict=True)] for ends in (high, low))
    group = {"legendgroup": name, "meta": {"run": run}}
    hidden = {"mode": "lines", "line": {"width": 0, "color": color}, "showlegend": False, "hoverinfo": "skip"}
    yield go.Scatter(x=steps, y=low, **hidden, **group)
    yield go.Scatter(x=steps, y=high, fill="tonexty", fillcolor=_faint(color), **hidden, **group)
    ends = list(zip(low, high, strict=True))
    yield go.Scatter(
        x=steps,
        y=middle,
        customdata=ends,
        name=html.escape(name),
        mode="lines" if single else "lines+markers",
        error_y=None if single else {"array": above, "arrayminus": below, "thickness": 1, "width": 3},
        marker={"symbol": SYMBOLS[run % len(SYMBOLS)]},
        line={"color": color, "width": 2, "dash": "dash" if single else "solid"},
        hovertemplate="%{y:.1%} [%{customdata[0]:.1%}, %{customdata[1]:.1%}]",
        **group,
    )


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def figure_of(
    unit: str, traces: Sequence[Any], *, x: str = "step", log: bool = False, stacked: bool = False, num_runs: int = 1
) -> dict[str, Any]:
    """Data and layout without a theme: the page adds its own colours, light or dark. With more than two runs it has one legend
    for all charts."""
    yaxis = {"title": {"text": unit}, "type": "log" if log else "linear", "hoverformat": ".4~g", "exponentformat": "e"}
    if unit == "share" or unit.endswith(", share"):
        yaxis |= {"tickformat": "~%", "hoverformat": ".2~%", "rangemode": "tozero"}
    layout = {
        "template": {},
        "hovermode": "x unified",
        "xaxis": {"title": {"text": x}},
        "yaxis": yaxis,
        "showlegend": num_runs <= 2 and sum(trace.showlegend is not False for trace in traces) > 1,
        **({"barmode": "stack"} if stacked else {}),
    }
    return {"data": [trace.to_plotly_json() for trace in traces], "layout": layout}
