"""The curves of a report as plotly figures, each with its numbers as a table.

Nothing is smoothed. Bands and bars are the intervals and percentiles that the run recorded.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from topd.report.chart_table import CHARTS, PER_TEACHER, UNITS, Chart
from topd.report.stored import StoredRun, names
from topd.run.catalogue import declared_name

Row = list[Any]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b3a800")
"""Okabe and Ito's palette for every kind of colour vision, with black and pale yellow replaced: they vanish on a background."""

_MAX_MARKERS = 60
"""Longer curves are drawn without a mark at every step."""

_DASHES = ("solid", "dash", "dot", "dashdot")
AXES = {"step": "step", "updates": "policy_version", "tokens": "tokens/total"}
"""What curves can be drawn over, and the metric behind it; hours are summed from seconds/step."""


def charts(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """All charts with something to show: id, section, title, unit, note, plotly figure, and the table of its numbers."""
    return [*_accuracy(runs, names(runs)), *(entry for chart in (*CHARTS, *_per_teacher(runs)) for entry in _chart(chart, runs))]


def _chart(chart: Chart, runs: Sequence[StoredRun]) -> Iterator[dict[str, Any]]:
    """The chart's entry; none if no run has anything to show."""
    labels = names(runs)
    traces: list[Any] = []
    rows: list[Row] = []
    for i, run in enumerate(runs):
        lines = {metric: run.series(metric) for metric in chart.lines}
        if any((x or chart.always) and x is not None for series in lines.values() for x in series):
            traces += _traces(chart, lines, run, labels[i], i, len(runs) > 1)
            steps = [row["step"] for row in run.metrics]
            rows += [[labels[i], step, *at] for step, at in zip(steps, zip(*lines.values(), strict=True), strict=True)]
    if rows:
        columns = ["run", "step", *(f"{metric} ({UNITS[declared_name(metric)]})" for metric in chart.lines)]
        yield _entry(
            chart,
            figure_of(chart.unit, traces, log=chart.log, stacked=chart.stacked),
            columns,
            rows,
            _summary(rows, at=4 if chart.band else 2),
        )


def axes(runs: Sequence[StoredRun]) -> list[dict[str, list[float | None]]]:
    """Per run the position of every recorded step on every axis, for a reader who compares by tokens or time."""
    found: list[dict[str, list[float | None]]] = []
    for run in runs:
        positions = {name: run.series(metric) for name, metric in AXES.items()}
        total = 0.0
        hours: list[float | None] = []
        for seconds in run.series("seconds/step"):
            total += seconds or 0.0
            hours.append(total / 3600)
        found.append({**positions, "hours": hours})
    return found


def _entry(chart: Chart, figure: dict[str, Any], columns: list[str], rows: list[Row], summary: str) -> dict[str, Any]:
    return {
        "id": chart.id,
        "section": chart.section,
        "title": chart.title,
        "unit": chart.unit,
        "note": chart.note,
        "summary": summary,
        "figure": figure,
        "columns": columns,
        "rows": rows,
    }


def _summary(rows: Sequence[Row], at: int) -> str:
    """First and last number of every run in words, for those who do not see the curve."""
    words = []
    for name in dict.fromkeys(row[0] for row in rows):
        found = [(row[1], row[at]) for row in rows if row[0] == name and row[at] is not None]
        if found:
            (first, before), (last, after) = found[0], found[-1]
            words.append((name, f"{before:.4g} at step {first}" + (f", {after:.4g} at step {last}" if last != first else "")))
    return "; ".join(text if len(words) == 1 else f"{name}: {text}" for name, text in words) + "." if words else ""


def _per_teacher(runs: Sequence[StoredRun]) -> Iterator[Chart]:
    """With several teachers: gap, reward, groups and dropped groups of each."""
    tables = [run.setting("teachers") for run in runs]
    teachers = sorted({name for table in tables if isinstance(table, Mapping) for name in table})
    for what, title in PER_TEACHER.items() if teachers else ():
        lines = {f"teacher/{name}/{what}": name for name in teachers}
        yield Chart(id=f"teachers-{what}", section="Teacher", title=title, lines=lines, always=what != "dropped_groups")


def _traces(
    chart: Chart, lines: Mapping[str, list[float | None]], run: StoredRun, label: str, index: int, several: bool
) -> Iterator[Any]:
    """The lines of one run: a colour for every run and a dash for every line, or, with a single run, a colour for every line."""
    steps = [row["step"] for row in run.metrics]
    for at, (metric, series) in enumerate(lines.items()):
        color = COLORS[(index if several or chart.band else at) % len(COLORS)]
        name = chart.lines[metric]
        if several:
            name = f"{label}: {name}" if len(lines) > 1 else label
        common = {"x": steps, "meta": {"run": index}, "legendgroup": str(index) if several else metric}
        if chart.stacked and not several:
            is_rest = metric == "seconds/step"
            y = _rest(run, series) if is_rest else series
            yield go.Bar(y=y, marker={"color": color}, name="rest of the step" if is_rest else html.escape(name), **common)
            continue
        is_edge = chart.band and at < 2
        dash = _DASHES[at % len(_DASHES)] if several and not chart.band else "solid"
        yield go.Scatter(
            y=series,
            name=html.escape(name),
            mode="lines" if is_edge or len(steps) > _MAX_MARKERS else "lines+markers",
            line={"color": color, "width": 0.5 if is_edge else 2, "dash": dash},
            marker={"size": 5},
            fill="tonexty" if is_edge and at == 1 else None,
            fillcolor=_faint(color),
            showlegend=not is_edge,
            **common,
        )


def _rest(run: StoredRun, whole: list[float | None]) -> list[float | None]:
    """Seconds of a step that no phase accounts for."""
    phases = [run.series(f"seconds/{name}") for name in ("rollout", "teacher", "update")]
    parts = [sum(phase[i] or 0.0 for phase in phases) for i in range(len(whole))]
    return [None if total is None else max(0.0, total - part) for total, part in zip(whole, parts, strict=True)]


def _accuracy(runs: Sequence[StoredRun], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One chart per benchmark: the student over the steps with its intervals; the teacher as a level."""
    several = len(runs) > 1
    for benchmark in dict.fromkeys(row["benchmark"] for run in runs for row in run.evaluations):
        traces: list[Any] = []
        rows: list[Row] = []
        for i, run in enumerate(runs):
            own = sorted((row for row in run.evaluations if row["benchmark"] == benchmark), key=lambda row: row["step"])
            for who in ("student", "teacher"):
                points = [row for row in own if row["model"] == who]
                if points:
                    name = f"{labels[i]}: {who}" if several else who
                    last = max((row["step"] for row in own), default=0)
                    traces += _interval(points, name, i, COLORS[(i if several else who == "teacher") % len(COLORS)], last)
                for row in points:
                    rows.append([labels[i], row["step"], who, row["avg_at_k"], *row["ci95"], row.get("k"), row.get("problems")])
        chart = Chart(
            id=f"accuracy-{benchmark}",
            section="Result",
            title=f"Accuracy on {benchmark}",
            lines={"reward/mean": ""},
            note="avg@k on held-out problems, with 95 % intervals over the problems.",
        )
        columns = ["run", "step", "model", "avg@k", "interval low", "interval high", "k", "problems"]
        students = _summary([row for row in rows if row[2] == "student"], at=3)
        yield {**_entry(chart, figure_of("avg@k, share", traces), columns, rows, students), "unit": "avg@k, share"}


def _interval(points: Sequence[Mapping[str, Any]], name: str, run: int, color: str, last: int) -> Iterator[Any]:
    """A line with a bar at every evaluation and a band between; a single one (the teacher) as a level over the whole run."""
    single = len(points) == 1 and points[0]["model"] == "teacher" and last > 0
    shown = [points[0], {**points[0], "step": last}] if single else list(points)
    steps = [row["step"] for row in shown]
    low, high = ([row["ci95"][end] for row in shown] for end in (0, 1))
    middle = [row["avg_at_k"] for row in shown]
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
        line={"color": color, "width": 2, "dash": "dash" if single else "solid"},
        hovertemplate="%{y:.1%} [%{customdata[0]:.1%}, %{customdata[1]:.1%}]",
        **group,
    )


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def figure_of(unit: str, traces: Sequence[Any], *, x: str = "step", log: bool = False, stacked: bool = False) -> dict[str, Any]:
    """Data and layout without a theme: the page adds its own colours, light or dark."""
    figure = go.Figure(data=list(traces))
    figure.update_layout(
        template=None,
        barmode="stack" if stacked else None,
        hovermode="x unified",
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": unit}, "type": "log" if log else "linear", "hoverformat": ".4~g"},
        showlegend=sum(trace.showlegend is not False for trace in traces) > 1,
    )
    if unit == "share" or unit.endswith(", share"):
        figure.update_yaxes(tickformat="~%", hoverformat=".2~%", rangemode="tozero")
    return dict(figure.to_plotly_json())
