"""What the report makes of the files of `topd rescore`: their numbers, and no crash on files of another shape."""

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from plotly.utils import PlotlyJSONEncoder

from tests.report.folders import VECTOR, write_run
from topd.report.rescoring.difference import PAIRS, SINGLES
from topd.report.rescoring.figures import rescored
from topd.report.rescoring.rescore import rescore
from topd.report.stored import StoredRun, read_run

WORDS = {9: b"7", 14: b"<b>\x1b", 1: b";", 7: b"8"}
FORMS = {
    **dict.fromkeys(("reward_std", "mean_abs_advantage"), ".4f"),
    **dict.fromkeys(("floor_share", "top_share", "sign_changes"), ".1%"),
    **dict.fromkeys(("reward_mean", "pearson", "spearman", "cosine"), "+.4f"),
    "silent_groups": ",d",
}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {"a": VECTOR, "b": VECTOR[::-1]}, words=WORDS)


def made(run: Path, *words: str, **options: Any) -> dict[str, Any]:
    rescore(run, words or ("--algorithm.alpha", "0.1"), **options)
    [file] = (run / "rescores").iterdir()
    return json.loads(file.read_text())


def entries(run: Path) -> tuple[StoredRun, list[dict[str, Any]]]:
    read = read_run(run)
    return read, list(rescored(read, "mine"))


def numbers(entry: dict[str, Any]) -> dict[str, list[str]]:
    """Name in the file -> what is shown of it under the old and the new settings."""
    names = {words: name for name, words in (PAIRS | SINGLES).items()}
    return {names[words]: [old, new] for words, old, new in entry["rows"]}


def put(run: Path, found: Any, name: str = "x") -> None:
    (run / "rescores").mkdir(exist_ok=True)
    (run / "rescores" / f"{name}.json").write_text(json.dumps(found))


def test_a_rescore_is_shown_with_its_numbers(run: Path) -> None:
    found = made(run)
    read, [entry] = entries(run)
    overall = found["overall"]
    assert read.problems == []
    assert entry["title"] == f"mine: {found['name']} (alpha 0.2 -> 0.1)"
    assert entry["notes"] == [f"Over 10 of 10 tokens in 1 steps of mine. Made by topd {found['topd_version']}."]
    rows = numbers(entry)
    for name, form in FORMS.items():
        both = isinstance(overall[name], dict)
        expected = [format(overall[name][side], form) for side in ("old", "new")] if both else ["", format(overall[name], form)]
        assert rows[name] == expected, name
    assert rows.keys() == FORMS.keys()
    assert rows["silent_groups"] == ["0", "0"]


def test_the_tokens_that_change_most_are_named(run: Path) -> None:
    found = made(run)
    _, [entry] = entries(run)
    assert len(entry["tokens"]) == 10
    for row, token in zip(entry["tokens"], found["top_changes"], strict=True):
        assert row[:4] == (token["step"], token["group"], token["rollout"], token["position"])
        assert row[5:] == (f"{token['old']:.3f}", f"{token['new']:.3f}")
    assert {row[4] for row in entry["tokens"]} == {"7", "<b><ESC>", ";", "8"}


def test_the_charts_hold_every_bin_and_every_step(run: Path) -> None:
    found = made(run)
    _, [entry] = entries(run)
    steps, advantages, joint = entry["charts"]
    assert {chart["section"] for chart in entry["charts"]} == {"Rescored"}
    assert steps["columns"] == ["step", "pearson", "spearman", "cosine", "sign_changes"]
    assert steps["rows"] == [[row[name] for name in steps["columns"]] for row in found["steps"]]
    assert [list(trace["y"]) for trace in steps["figure"]["data"]] == [
        [row[name] for row in found["steps"]] for name in steps["columns"][1:]
    ]
    edges, old, new = (found["histogram"][name] for name in ("edges", "old", "new"))
    assert advantages["rows"] == [[edges[i], edges[i + 1], old[i], new[i]] for i in range(len(old))]
    assert [list(trace["y"]) for trace in advantages["figure"]["data"]] == [old, new]
    assert list(advantages["figure"]["data"][0]["x"]) == pytest.approx([(a + b) / 2 for a, b in itertools.pairwise(edges)])
    assert advantages["figure"]["layout"]["barmode"] == "overlay"
    counts = found["joint"]["counts"]
    assert sum(row[2] for row in joint["rows"]) == sum(map(sum, counts)) == 10
    z = joint["figure"]["data"][0]["z"]
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            assert z[j][i] == (math.log10(count) if count else None)
    for x, y, count in joint["rows"]:
        column, line = (list(joint["figure"]["data"][0][name]).index(at) for name, at in (("x", x), ("y", y)))
        assert counts[column][line] == count


def test_every_chart_has_an_identity_axes_and_readable_json(run: Path) -> None:
    made(run)
    rescore(run, ("--algorithm.type", "opd"))
    rescore(run, ("--algorithm.reward", "log_ratio"))
    _, found = entries(run)
    charts = [chart for entry in found for chart in entry["charts"]]
    assert len({chart["id"] for chart in charts}) == 9
    for chart in charts:
        layout = chart["figure"]["layout"]
        assert layout["xaxis"]["title"]["text"]
        assert layout["yaxis"]["title"]["text"]
    json.loads(json.dumps(charts, cls=PlotlyJSONEncoder), parse_constant=lambda constant: pytest.fail(constant))


def test_no_difference_is_said(run: Path) -> None:
    made(run, "--algorithm.alpha", "0.2")
    _, [entry] = entries(run)
    assert "The credit is exactly the same." in entry["notes"][0]
    assert entry["tokens"] == []
    assert "(" not in entry["title"].removeprefix("mine: ")


def test_what_is_not_defined_is_a_dash(run: Path) -> None:
    found = made(run)
    for name in ("pearson", "spearman", "cosine", "sign_changes"):
        found["overall"][name] = None
    found["overall"]["floor_share"] = {"old": 0.5, "new": None}
    [file] = (run / "rescores").iterdir()
    file.write_text(json.dumps(found))
    read, [entry] = entries(run)
    rows = numbers(entry)
    assert rows["spearman"] == ["", "-"]
    assert rows["floor_share"] == ["50.0%", "-"]
    assert read.problems == []


def test_a_run_without_rescores_has_no_entries_and_reads_no_vocabulary(run: Path) -> None:
    (run / "vocabulary.parquet").unlink()
    read, found = entries(run)
    assert (found, read.problems) == ([], [])


def test_a_file_of_another_shape_is_named_and_the_others_are_shown(run: Path) -> None:
    made(run, name="m")
    for name, found in (("a", {"format": 2}), ("b", {}), ("z", {"format": 1})):
        put(run, found, name)
    read, shown = entries(run)
    assert [entry["title"] for entry in shown] == ["mine: m (alpha 0.2 -> 0.1)"]
    assert [problem.startswith("a file in rescores/ could not be shown (") for problem in read.problems] == [True] * 3
    assert "its format is 2" in read.problems[0]


def test_any_part_of_a_file_may_be_damaged(run: Path) -> None:
    """Every part in turn is replaced by something of another kind, or left out."""
    found = made(run)
    [file] = (run / "rescores").iterdir()
    wrong = itertools.cycle(("gone", None, 3, "x", [], {}, [1], [[1]], -1.5))
    for keys in places(found):
        replace(file, found, keys, next(wrong))
        read, shown = entries(run)
        assert len(shown) + len(read.problems) == 1, keys
        json.dumps(shown, cls=PlotlyJSONEncoder)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        *((("joint", "counts"), [[1]]), (("joint", "counts"), []), (("joint", "counts", 0, 0), -1), (("joint", "old_edges"), [])),
        *((("histogram", "edges"), [0, 1]), (("histogram", "old"), [1]), (("overall", "pearson"), "x"), (("overall",), None)),
        *((("steps",), [{}]), (("top_changes",), [{}]), (("changed",), {"a": 3}), (("format",), "1"), (("name",), "gone")),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_named(run: Path, keys: tuple[Any, ...], wrong: Any) -> None:
    found = made(run)
    [file] = (run / "rescores").iterdir()
    replace(file, found, keys, wrong)
    read, shown = entries(run)
    assert shown == []
    assert len(read.problems) == 1
    assert read.problems[0].startswith("a file in rescores/ could not be shown (")


def replace(file: Path, found: dict[str, Any], keys: tuple[Any, ...], wrong: Any) -> None:
    """Write it with one part replaced, or left out if that is "gone"."""
    part = broken = copy.deepcopy(found)
    for key in keys[:-1]:
        part = part[key]
    if wrong == "gone":
        del part[keys[-1]]
    else:
        part[keys[-1]] = wrong
    file.write_text(json.dumps(broken))


def places(part: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a file; of lists the first entry."""
    inner = part.items() if isinstance(part, dict) else enumerate(part[:1]) if isinstance(part, list) else ()
    own = [keys] if keys else []
    return own + [place for key, value in inner for place in places(value, (*keys, key))]


def test_hostile_names_do_not_reach_a_figure(run: Path) -> None:
    found = made(run)
    found["name"] = HOSTILE + "\u202e"
    found["changed"] = {HOSTILE: {"old": HOSTILE, "new": HOSTILE}}
    [file] = (run / "rescores").iterdir()
    file.write_text(json.dumps(found))
    _, [entry] = entries(run)
    figures = json.dumps([chart["figure"] for chart in entry["charts"]], cls=PlotlyJSONEncoder)
    assert "<img" not in figures
    assert "U+202E" in entry["charts"][0]["title"]
