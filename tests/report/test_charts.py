"""The curves: every recorded number is in one of them, exactly as it was recorded, with its unit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from plotly.utils import PlotlyJSONEncoder

from tests.report.folders import VECTOR, write_evaluations, write_metrics, write_run
from topd.report.chart_table import CHARTS, PER_TEACHER
from topd.report.charts import AXES, MAX_POINTS, axes, charts
from topd.report.stored import read_run
from topd.run.catalogue import METRICS, NAMES, declared_name

Entry = dict[str, Any]
UNITS = {metric.name: metric.unit for metric in METRICS}
PER_TEACHER_NAMES = ("gap", "token_reward", "groups", "dropped_groups")
WORDED = {"s": "seconds", "norm": "norm of the gradient", "rate": "learning rate", "count": "number", "score": "score in [0, 1]"}
"""Units that an axis names at greater length."""

HOSTILE = "<img src=x onerror=alert(1)>"


def config(path: Path, table: dict[str, Any]) -> None:
    (path / "config.toml").write_text(tomli_w.dumps(table))


def run_of(path: Path, rows: list[dict[str, Any]], evaluations: list[dict[str, Any]] = (), teachers: tuple[str, ...] = ()) -> Any:
    path.mkdir(parents=True, exist_ok=True)
    config(path, {"algorithm": {"type": "topd"}, "teachers": {name: {"domains": ["x"]} for name in teachers}})
    write_metrics(path, rows)
    write_evaluations(path, evaluations)
    return read_run(path)


def full(steps: int = 3, teachers: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Every metric, with a number of its own at every step."""
    names = [name for name in NAMES if "NAME" not in name and name != "step"]
    names += [f"teacher/{teacher}/{what}" for teacher in teachers for what in PER_TEACHER_NAMES]
    return [{name: 1 + i + step / 8 for i, name in enumerate(sorted(names))} for step in range(steps)]


def evaluation(step: int, value: float, model: str = "student", benchmark: str = "held_out", **more: Any) -> dict[str, Any]:
    interval = [value - 0.125, value + 0.125]
    return {
        "benchmark": benchmark,
        "model": model,
        "step": step,
        "avg_at_k": value,
        "ci95": interval,
        "k": 4,
        "problems": 9,
        **more,
    }


def by_id(entries: list[Entry]) -> dict[str, Entry]:
    found = {entry["id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def table(entry: Entry, run: str) -> list[list[Any]]:
    return [row[1:] for row in entry["rows"] if row[0] == run]


def traces(entry: Entry) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(trace, cls=PlotlyJSONEncoder)) for trace in entry["figure"]["data"]]


def test_every_metric_is_in_a_chart_or_is_an_axis() -> None:
    in_charts = [name for chart in CHARTS for name in chart.lines] + [f"teacher/NAME/{what}" for what in PER_TEACHER]
    assert {*in_charts, *AXES.values()} == NAMES
    assert len(set(in_charts)) == len(in_charts)
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)
    for chart in CHARTS:
        assert len({UNITS[declared_name(name)] for name in chart.lines}) == 1, chart.id
        assert chart.unit == UNITS[next(iter(chart.lines))]


def test_every_recorded_number_is_in_a_table(tmp_path: Path) -> None:
    rows = full(teachers=("math", "code"))
    found: dict[str, list[Any]] = {}
    for entry in charts([run_of(tmp_path / "run", rows, teachers=("math", "code"))]):
        assert entry["columns"][:2] == ["run", "step"]
        assert [row[:2] for row in entry["rows"]] == [["run", 1], ["run", 2], ["run", 3]]
        for i, column in enumerate(entry["columns"][2:], 2):
            name, _, unit = column.partition(" ")
            assert unit == f"({UNITS[declared_name(name)]})"
            found[name] = [row[i] for row in entry["rows"]]
    recorded = {name: [row[name] for row in rows] for name in rows[0] if name not in AXES.values()}
    assert found == recorded


def test_every_line_is_as_recorded_with_its_gaps(tmp_path: Path) -> None:
    """Nothing is smoothed or joined over a gap; what is no number is a gap."""
    values = [1.0, None, math.nan, "x", 5.0, -math.inf, 2.0]
    entry = by_id(charts([run_of(tmp_path / "run", [{"teacher/gap": value} for value in values])]))["gap"]
    expected = [1.0, None, None, None, 5.0, None, 2.0]
    [trace] = traces(entry)
    assert (trace["x"], trace["y"]) == ([1, 2, 3, 4, 5, 6, 7], expected)
    assert not trace.get("connectgaps")
    assert trace["line"].get("shape", "linear") == "linear"
    assert [row[2] for row in entry["rows"]] == expected
    assert entry["summary"] == "1 at step 1, 2 at step 7."


def test_steps_are_those_recorded(tmp_path: Path) -> None:
    entry = by_id(charts([run_of(tmp_path / "run", [{"step": 4, "grade/mean": 0.25}, {"step": 9, "grade/mean": 0.5}])]))["grade"]
    assert traces(entry)[0]["x"] == [4, 9]
    assert table(entry, "run") == [[4, 0.25], [9, 0.5]]
    assert entry["summary"] == "0.25 at step 4, 0.5 at step 9."


def test_a_band_lies_between_its_percentiles_and_its_words_are_of_the_median(tmp_path: Path) -> None:
    rows = [{"ratio/p01": 0.5, "ratio/p50": 1.0, "ratio/p99": 2.0}, {"ratio/p01": 0.25, "ratio/p50": 1.125, "ratio/p99": 4.0}]
    entry = by_id(charts([run_of(tmp_path / "run", rows)]))["ratio"]
    low, high, median = traces(entry)
    assert (low["y"], high["y"], median["y"]) == ([0.5, 0.25], [2.0, 4.0], [1.0, 1.125])
    assert (low.get("fill"), high["fill"], median.get("fill")) == (None, "tonexty", None)
    assert [trace["showlegend"] for trace in (low, high, median)] == [False, False, True]
    assert entry["summary"].split("; ") == [
        "1st percentile 0.5 at step 1, 0.25 at step 2",
        "99th percentile 2 at step 1, 4 at step 2",
        "median 1 at step 1, 1.125 at step 2.",
    ]


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    seconds = {"rollout": 2.0, "teacher": 1.0, "update": 0.5, "step": 4.0}
    short = {**seconds, "step": 3.0, "teacher": None}
    rows = [{f"seconds/{name}": value for name, value in row.items()} for row in (seconds, short)]
    entry = by_id(charts([run_of(tmp_path / "run", rows)]))["seconds"]
    bars = traces(entry)
    assert entry["figure"]["layout"]["barmode"] == "stack"
    assert [bar["type"] for bar in bars] == ["bar"] * 4
    assert [sum(bar["y"][step] or 0 for bar in bars) for step in (0, 1)] == [4.0, 3.0]
    assert bars[-1]["name"] == "rest of the step"
    assert table(entry, "run") == [[1, 2.0, 1.0, 0.5, 4.0], [2, 2.0, None, 0.5, 3.0]]


def test_what_rounding_leaves_is_no_negative_rest(tmp_path: Path) -> None:
    rows = [
        {"seconds/rollout": 2.0, "seconds/teacher": 1.0, "seconds/update": 1.1, "seconds/step": 4.0},
        {"seconds/rollout": 1.0},
    ]
    *_, rest = traces(by_id(charts([run_of(tmp_path / "run", rows)]))["seconds"])
    assert rest["y"] == [0.0, None]


def test_several_runs_have_lines_and_not_bars(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, full(steps)) for name, steps in (("a", 2), ("b", 3))]
    found = by_id(charts(runs))
    for entry in found.values():
        assert {trace["type"] for trace in traces(entry)} == {"scatter"}
        assert {trace["meta"]["run"] for trace in traces(entry)} == {0, 1}
        assert len(table(entry, "a")) == 2
        assert len(table(entry, "b")) == 3
    gap = traces(found["gap"])
    assert [trace["name"] for trace in gap] == ["a", "b"]
    assert gap[0]["line"]["color"] != gap[1]["line"]["color"]
    seconds = traces(found["seconds"])
    assert [trace["name"] for trace in seconds[:4]] == ["a: rollout", "a: teacher", "a: update", "a: whole step"]
    assert seconds[3]["y"] == [row["seconds/step"] for row in full(2)]
    assert len({trace["line"]["dash"] for trace in seconds[:4]}) == 4
    assert len({trace["line"]["color"] for trace in seconds[:4]}) == 1
    assert found["gap"]["summary"].startswith("a: ")
    assert "; b: " in found["gap"]["summary"]


def test_a_run_without_a_metric_is_left_out_of_its_chart(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", [{"grade/mean": 1.0}]), run_of(tmp_path / "b", [{"teacher/gap": 2.0}])]
    found = by_id(charts(runs))
    assert found.keys() == {"grade", "gap"}
    assert {row[0] for row in found["gap"]["rows"]} == {"b"}
    assert [trace["meta"]["run"] for trace in traces(found["gap"])] == [1]


def test_more_runs_than_colours_are_drawn_as_well(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / f"r{i}", [{"grade/mean": i / 16}], [evaluation(0, 0.5)]) for i in range(11)]
    found = by_id(charts(runs))
    assert [trace["y"] for trace in traces(found["grade"])] == [[i / 16] for i in range(11)]
    assert len(found["accuracy-held_out"]["rows"]) == 11


@pytest.mark.parametrize(
    ("metric", "chart", "shown"),
    [
        *(("advantage/degenerate_groups", "degenerate", False), ("teacher/dropped_groups", "dropped", False)),
        *(("policy/lag", "lag", False), ("grade/grader_errors", "grader-errors", False), ("ratio/clip_share", "clip", True)),
        *(("grade/mean", "grade", True), ("teacher/retries", "requests", False), ("teacher/cached", "cached", False)),
    ],
)
def test_zeros_are_drawn_unless_they_mean_that_nothing_happened(tmp_path: Path, metric: str, chart: str, shown: bool) -> None:
    path = tmp_path / "run"
    assert (chart in by_id(charts([run_of(path, [{metric: 0}, {metric: 0}])]))) == shown
    assert chart in by_id(charts([run_of(path, [{metric: 0}, {metric: 1}])]))


def test_nothing_to_show_gives_no_chart(tmp_path: Path) -> None:
    empty = run_of(tmp_path / "empty", [])
    assert charts([empty]) == charts([]) == charts([run_of(tmp_path / "x", [{}, {"grade/mean": None}])]) == []
    assert axes([empty]) == [{"step": [], "updates": [], "tokens": [], "hours": []}]


def test_metrics_of_another_version_are_drawn_as_well(tmp_path: Path) -> None:
    entry = by_id(charts([run_of(tmp_path / "run", [{"new/metric": 1.5, "words": "x"}, {"new/metric": 2.5}])]))["other-0"]
    assert (entry["section"], entry["title"], entry["unit"]) == ("Other", "new/metric", "unknown")
    assert table(entry, "run") == [[1, 1.5], [2, 2.5]]


def test_of_very_long_runs_some_steps_are_drawn_the_last_among_them(tmp_path: Path) -> None:
    values = [float(i) for i in range(3 * MAX_POINTS)]
    entry = by_id(charts([run_of(tmp_path / "run", [{"grade/mean": value} for value in values])]))["grade"]
    [trace] = traces(entry)
    assert trace["y"] == [*values[::3], values[-1]]
    assert trace["x"] == [value + 1 for value in trace["y"]]
    assert table(entry, "run") == [[x, y] for x, y in zip(trace["x"], trace["y"], strict=True)]
    assert entry["note"] == "Of long runs one in 3 steps is drawn."


def test_charts_of_several_teachers(tmp_path: Path) -> None:
    rows = [{f"teacher/{name}/{what}": 1.0 for name in ("b", "a") for what in PER_TEACHER_NAMES}]
    rows[0] |= {"teacher/a/dropped_groups": 0, "teacher/b/dropped_groups": 0}
    found = by_id(charts([run_of(tmp_path / "run", rows, teachers=("b", "a"))]))
    assert found.keys() == {"teachers-gap", "teachers-token_reward", "teachers-groups"}
    assert [trace["name"] for trace in traces(found["teachers-gap"])] == ["a", "b"]
    assert found["teachers-gap"]["unit"] == UNITS["teacher/NAME/gap"]
    assert charts([run_of(tmp_path / "other", [])]) == []
    (tmp_path / "run/config.toml").write_text("teachers = 3\n")
    assert charts([read_run(tmp_path / "run")]) == []


@pytest.mark.parametrize("several", [False, True])
def test_every_figure_names_its_axes_with_units(tmp_path: Path, several: bool) -> None:
    runs = [run_of(tmp_path / name, full(teachers=("t",)), [evaluation(1, 0.5)], ("t",)) for name in "ab"[: 1 + several]]
    entries = charts(runs)
    assert len(entries) == len(CHARTS) + len(PER_TEACHER) + 1
    for entry in entries:
        layout = entry["figure"]["layout"]
        assert layout["xaxis"]["title"]["text"] == "step"
        assert layout["yaxis"]["title"]["text"] == WORDED.get(entry["unit"], entry["unit"])
        assert entry["unit"]
        assert entry["title"]
        assert entry["section"] in ("Result", "Teacher", "Update", "Completions", "Speed")
        is_share = entry["unit"].endswith("share")
        assert layout["yaxis"].get("tickformat") == ("~%" if is_share else None)
        named = [trace for trace in entry["figure"]["data"] if trace.get("showlegend") is not False]
        assert layout["showlegend"] == (len(named) > 1)
    assert by_id(entries)["mismatch"]["figure"]["layout"]["yaxis"]["type"] == "log"


def test_names_cannot_be_markup(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / (HOSTILE + name), full(1, (HOSTILE,)), [evaluation(0, 0.5)], (HOSTILE,)) for name in "ab"]
    for entry in (*charts(runs), *charts(runs[:1])):
        for trace in traces(entry):
            assert "<" not in trace.get("name", "")
    seconds = traces(by_id(charts(runs))["seconds"])[0]["name"]
    assert seconds == "&lt;img src=x onerror=alert(1)&gt;a: rollout"


def test_figures_are_json_that_a_browser_reads(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = [dict.fromkeys(full(1)[0], value) for value in (math.nan, math.inf, 1e308, -1e-300, 0)]
    text = json.dumps(charts([run_of(tmp_path / "run", rows, [evaluation(0, 0.5)])]), cls=PlotlyJSONEncoder)
    for entry in json.loads(text, parse_constant=refuse):
        assert entry["figure"]["data"]


def test_accuracy_is_drawn_with_its_intervals(tmp_path: Path) -> None:
    rows = [evaluation(8, 0.5), evaluation(0, 0.25), evaluation(0, 0.75, "teacher"), evaluation(8, 0.625, benchmark="other")]
    found = by_id(charts([run_of(tmp_path / "run", [], rows)]))
    assert list(found) == ["accuracy-held_out", "accuracy-other"]
    entry = found["accuracy-held_out"]
    assert entry["columns"] == ["run", "step", "model", "avg@k", "interval low", "interval high", "k", "problems"]
    assert entry["rows"] == [
        ["run", 0, "student", 0.25, 0.125, 0.375, 4, 9],
        ["run", 8, "student", 0.5, 0.375, 0.625, 4, 9],
        ["run", 0, "teacher", 0.75, 0.625, 0.875, 4, 9],
    ]
    low, high, student, teacher_low, teacher_high, teacher = traces(entry)
    assert (low["y"], high["y"], student["y"]) == ([0.125, 0.375], [0.375, 0.625], [0.25, 0.5])
    assert student["customdata"] == [[0.125, 0.375], [0.375, 0.625]]
    assert (student["x"], student["name"], high["fill"]) == ([0, 8], "student", "tonexty")
    assert (teacher["x"], teacher["y"]) == ([0, 8], [0.75, 0.75])
    assert (teacher_low["y"], teacher_high["y"]) == ([0.625, 0.625], [0.875, 0.875])
    assert teacher["line"]["color"] != student["line"]["color"]
    assert entry["summary"] == "0.25 at step 0, 0.5 at step 8."
    assert entry["unit"] == entry["figure"]["layout"]["yaxis"]["title"]["text"] == "avg@k, share"


def test_a_teacher_that_was_evaluated_often_or_alone_is_drawn_as_measured(tmp_path: Path) -> None:
    often = [evaluation(0, 0.25, "teacher"), evaluation(4, 0.5, "teacher"), evaluation(8, 0.5)]
    *_, teacher = traces(charts([run_of(tmp_path / "a", [], often)])[0])
    assert (teacher["x"], teacher["y"]) == ([0, 4], [0.25, 0.5])
    *_, alone = traces(charts([run_of(tmp_path / "b", [], [evaluation(0, 0.25, "teacher")])])[0])
    assert (alone["x"], alone["y"]) == ([0], [0.25])


def test_accuracy_of_several_runs(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / name, [], [evaluation(0, value), evaluation(2, value)]) for name, value in (("a", 0.25), ("b", 0.5))
    ]
    [entry] = charts([*runs, run_of(tmp_path / "c", [])])
    lines = [trace for trace in traces(entry) if trace.get("showlegend") is not False]
    assert [(line["name"], line["y"]) for line in lines] == [("a: student", [0.25] * 2), ("b: student", [0.5] * 2)]
    assert lines[0]["line"]["color"] != lines[1]["line"]["color"]
    assert entry["summary"] == "a: 0.25 at step 0, 0.25 at step 2; b: 0.5 at step 0, 0.5 at step 2."


def test_axes_are_positions_of_the_recorded_steps(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "policy_version": 2, "tokens/total": 100, "seconds/step": 1800.0},
        {"step": 2, "policy_version": 4, "tokens/total": 250},
        {"step": 3, "policy_version": 6, "tokens/total": 300, "seconds/step": 5400.0},
    ]
    assert axes([run_of(tmp_path / "run", rows)]) == [
        {"step": [1, 2, 3], "updates": [2, 4, 6], "tokens": [100, 250, 300], "hours": [0.5, 0.5, 2.0]}
    ]


def test_long_curves_have_no_marks_and_all_their_points(tmp_path: Path) -> None:
    values = [i / 64 for i in range(100)]
    run = run_of(tmp_path / "run", [{"grade/mean": value} for value in values])
    [trace] = traces(by_id(charts([run]))["grade"])
    assert trace["y"] == values
    assert trace["mode"] == "lines"
    [short] = traces(by_id(charts([run_of(tmp_path / "short", [{"grade/mean": 1.0}])]))["grade"])
    assert short["mode"] == "lines+markers"


def test_a_folder_with_rollouts_alone_has_no_charts(tmp_path: Path) -> None:
    assert charts([read_run(write_run(tmp_path / "run", {"a": VECTOR}))]) == []
