"""report.html: one file in which nothing can execute but its own script, with the numbers of the run folders."""

import base64
import errno
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from plotly.offline import get_plotlyjs

import topd
from tests.e2e.tiny import tiny_config
from tests.report.folders import TOPD, VECTOR, write_evaluations, write_metrics, write_run, write_step
from topd.cli import main
from topd.errors import ConfigError
from topd.report import page
from topd.report.page import differences, render, write
from topd.report.rescoring.rescore import rescore
from topd.report.stored import read_run
from topd.run.digests import Digests

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&{{7*7}}"
WORDS = {9: b"7", 14: HOSTILE.encode(), 1: b";", 7: b"8"}
EVALUATION = {
    "benchmark": "held_out",
    "model": "student",
    "step": 0,
    "avg_at_k": 0.5,
    "ci95": [0.25, 0.75],
    "k": 4,
    "problems": 9,
}
FOREIGN = {
    "img",
    "svg",
    "math",
    "iframe",
    "frame",
    "object",
    "embed",
    "applet",
    "form",
    "base",
    "video",
    "audio",
    "source",
    "template",
}
VOID = {"meta", "link", "img", "br", "input"}


_packed = functools.cache(page._packed)


@pytest.fixture(autouse=True)
def packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plotting library is compressed for the first page only."""
    monkeypatch.setattr(page, "_packed", _packed)


class Parsed(HTMLParser):
    """Every tag with its attributes, the text of every script, and the text that a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def attributes(self, tag: str, name: str) -> list[str]:
        return [attributes[name] for found, attributes in self.tags if found == tag and name in attributes]


def words(parsed: Parsed) -> str:
    return " ".join(parsed.text.split())


def data_of(html: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    packed = re.search(r'<script type="application/octet-stream" id="data">(.*?)</script>', html, re.DOTALL)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed, validate=True)), parse_constant=refuse)


def without_time(html: str) -> str:
    return re.sub(r"Made \d{4}-\d\d-\d\d \d\d:\d\d by topd", "Made by topd", html)


def made(path: Path, **options: Any) -> str:
    return render([read_run(path)], **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "run", {"a": VECTOR, "b": VECTOR}, words=WORDS)
    write_metrics(path, [{"grade/mean": 0.25, "teacher/gap": 2.0}, {"grade/mean": 0.5, "teacher/gap": 1.0}])
    write_evaluations(path, [EVALUATION, {**EVALUATION, "step": 2, "avg_at_k": 0.625}, {**EVALUATION, "model": "teacher"}])
    return path


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Everything that a run folder says is hostile, its own name included."""
    settings = {**TOPD, "reward": HOSTILE}
    path = tmp_path / "<img src=x onerror=alert(3)>"
    write_run(path, {HOSTILE: VECTOR}, algorithm=settings, words=WORDS, prompt=HOSTILE, answer=HOSTILE, domain=HOSTILE)
    (path / "config.toml").write_text(
        tomli_w.dumps({"algorithm": settings, "student": {"name": HOSTILE}, "x": {HOSTILE: [HOSTILE]}})
    )
    (path / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "nested": {"x": [HOSTILE]}}))
    write_metrics(path, [{"teacher/gap": HOSTILE, HOSTILE: 1, "grade/mean": 0.5}])
    write_evaluations(path, [{**EVALUATION, "benchmark": HOSTILE, "k": HOSTILE, "problems": HOSTILE}, {HOSTILE: 1}])
    (path / "rescores").mkdir()
    (path / "rescores/x.json").write_text(json.dumps({"format": HOSTILE}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("page")
    for name, size in (("topd", 2), ("grpo", 2), ("sft", 1)):
        topd.train(tiny_config(base / name, algorithm__type=name, eval__max_problems=1, rollout__group_size=size))
    return {name: base / name for name in ("topd", "grpo", "sft")}


def assert_inert(html: str, served: bool = False) -> Parsed:
    """No script but the three of the page, no handler, nothing from elsewhere, and a policy that allows nothing else."""
    parsed = Parsed(html)
    assert parsed.open == []
    assert html.count("<script") == 3
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert scripts == [*({"type": "application/octet-stream", "id": name} for name in ("data", "plotly")), {}]
    assert not FOREIGN & {tag for tag, _ in parsed.tags}
    for tag, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "action", "formaction", "srcset", "data", "poster"):
            assert attributes.get(name, "#").startswith("#") or attributes[name] == "data:,", attributes
        if "style" in attributes:
            assert re.fullmatch(r"background:#[0-9a-f]{6}", attributes["style"])
    [policy] = parsed.attributes("meta", "content")[:1]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[2].encode()).digest()).decode()
    assert dict(part.split(" ", 1) for part in policy.split("; ")) == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}' 'strict-dynamic'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.search(r"url\(|@import", html.partition("<style>")[2].partition("</style>")[0])
    return parsed


@pytest.mark.parametrize("algorithm", ["topd", "grpo", "sft"])
def test_a_trained_run_has_its_page(trained: dict[str, Path], algorithm: str, tmp_path: Path) -> None:
    path = trained[algorithm]
    target = write([path], tmp_path / "page.html")
    html = target.read_text(encoding="utf-8")
    parsed = assert_inert(html)
    assert target.stat().st_size < 5_000_000
    text = words(parsed)
    assert f"{algorithm}, builtin:tiny-student" in text
    assert "finished after 2 steps." in text
    data = data_of(html)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for chart in data["charts"]:
        for i, column in enumerate(chart["columns"]):
            name = column.partition(" ")[0]
            if "/" in name:
                assert [row[i] for row in chart["rows"]] == [row.get(name) for row in rows]
    assert (data["axes"][0]["step"], len(data["lens"]["runs"])) == ([1, 2], 1)
    held = data["lens"]["runs"][0]["steps"]
    assert len(held) == (0 if algorithm == "sft" and not (path / "rollouts").is_dir() else 2)
    assert ("gap" in {chart["id"] for chart in data["charts"]}) == (algorithm == "topd")


def test_the_page_beside_a_finished_run_is_its_report(trained: dict[str, Path]) -> None:
    """`train` writes it at the end."""
    assert without_time((trained["topd"] / "report.html").read_text()) == without_time(made(trained["topd"]))


def test_nothing_hostile_becomes_markup(hostile: Path, folder: Path) -> None:
    for runs in ([hostile], [hostile, folder]):
        html = render([read_run(path) for path in runs])
        parsed = assert_inert(html)
        assert "{{7*7}}" in parsed.text
        assert "49" not in re.findall(r"&(\d+)", parsed.text)
        outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
        assert "<img" not in outside
        assert "alert(1)</script>" not in html
        assert HOSTILE in parsed.text


def test_the_data_of_a_hostile_run_can_be_read(hostile: Path) -> None:
    data = data_of(made(hostile))
    [group] = data["lens"]["runs"][0]["steps"][0]["groups"]
    assert "".join(part[1] if isinstance(part, list) else part for part in group["prompt"]) == HOSTILE
    for chart in data["charts"]:
        for trace in chart["figure"]["data"]:
            assert "<" not in trace.get("name", "")


def test_a_script_beyond_ascii_has_its_own_hash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = page._asset
    extra = "\n// Größe 漢 \U0001f680\n"
    monkeypatch.setattr(page, "_asset", lambda name: original(name) + (extra if name.endswith(".js") else ""))
    parsed = assert_inert(made(folder))
    assert parsed.scripts[2].count(extra) >= 2


def test_the_page_holds_the_plotting_library_and_no_other_script_has_markup(folder: Path) -> None:
    html = made(folder)
    packed = re.search(r'id="plotly">(.*?)</script>', html)[1]
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert "</script" not in Parsed(html).scripts[2]


def test_the_same_folder_gives_the_same_bytes(trained: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(trained["topd"], tmp_path / "topd")
    first, second = (write([copy], tmp_path / name).read_text() for name in "ab")
    assert without_time(first) == without_time(second)
    assert without_time(first) != first


def test_the_headline_is_base_student_and_teacher(folder: Path) -> None:
    best = {"1": {"value": 0.5}, "16": {"value": 0.875}, "4": {"value": 0.75}}
    write_evaluations(
        folder,
        [
            {**EVALUATION, "pass_at": best, "truncation_rate": 0.125, "mean_length": 12.25},
            {**EVALUATION, "step": 4, "avg_at_k": 0.75, "ci95": [0.5, 1.0]},
            {**EVALUATION, "step": 2, "avg_at_k": 0.6},
            {**EVALUATION, "model": "teacher", "avg_at_k": 1.0},
        ],
    )
    html = made(folder)
    rows = re.findall(r'<tr class="(\w+)">(.*?)</tr>', html)
    cells = [(who, re.findall(r"<t[hd][^>]*>(?:<strong>)?(.*?)(?:</strong>)?</t[hd]>", row)) for who, row in rows]
    assert cells == [
        ("base", ["base", "0", "50.0%", "25.0% to 75.0%", "87.5% (k = 16)", "12.5%", "12.2", "9 x 4"]),
        ("student", ["student", "4", "75.0%", "50.0% to 100.0%", "-", "-", "-", "9 x 4"]),
        ("teacher", ["teacher", "0", "100.0%", "25.0% to 75.0%", "-", "-", "-", "9 x 4"]),
    ]


@pytest.mark.parametrize(
    "pass_at",
    [
        3,
        None,
        "x",
        [],
        {"x": 1},
        {"2": 0.5},
        {"2": {}},
        {"2": {"value": "x"}},
        {"2": {"value": 0.5, "ci95": 3}},
        {"2": {"value": 0.5, "ci95": [1]}},
    ],
    ids=str,
)
def test_an_evaluation_may_lack_what_is_beside_the_point(folder: Path, pass_at: Any) -> None:
    odd = {"truncation_rate": None, "mean_length": "x", "k": None, "problems": []}
    write_evaluations(folder, [{**EVALUATION, "pass_at": pass_at, **odd}])
    assert "50.0%" in words(Parsed(made(folder)))


def test_nothing_evaluated_yet(folder: Path) -> None:
    (folder / "evals.jsonl").unlink()
    assert "Nothing was evaluated yet." in made(folder)


def test_an_unfinished_run_says_so(folder: Path) -> None:
    text = words(Parsed(made(folder)))
    assert "2 of 2 steps, not finished; it last wrote something at" in text
    (folder / "summary.json").write_text(json.dumps({"steps": 2}))
    assert "finished after 2 steps." in words(Parsed(made(folder)))
    (folder / "config.toml").write_text("[run\n")
    assert "config.toml could not be read" in words(Parsed(made(folder)))


def test_the_time_of_the_last_change_survives_files_that_vanish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run replaces its files while the report looks at them."""
    os.utime(folder / "config.toml", (4_000_000_000, 4_000_000_000))
    original = Path.iterdir

    def with_a_ghost(path: Path) -> Iterator[Path]:
        yield path / "summary.json.partial"
        yield from original(path)

    monkeypatch.setattr(Path, "iterdir", with_a_ghost)
    assert "it last wrote something at 2096-10-0" in words(Parsed(made(folder)))


def test_problems_of_a_folder_are_in_its_page(folder: Path) -> None:
    (folder / "rollouts/step_000001.parquet").write_text("")
    (folder / "rescores").mkdir()
    (folder / "rescores/x.json").write_text("{}")
    problems = re.findall(r'<p class="problem">(.*?)</p>', made(folder))
    assert any("rollouts of step 1 could not be read" in problem for problem in problems)
    assert any("a file in rescores/ could not be shown" in problem for problem in problems)


def test_a_page_says_whether_its_files_are_proven(folder: Path) -> None:
    assert "Note: there is no digests.jsonl (an older version wrote this folder" in words(Parsed(made(folder)))
    Digests(folder).note(folder / "config.toml", folder / "config.toml")
    assert "digests.jsonl" not in words(Parsed(made(folder)))


def test_what_differs_between_runs(tmp_path: Path) -> None:
    tables = [
        {
            "run": {"directory": "a", "resume": True, "steps": 2},
            "algorithm": {"type": "topd", "alpha": 0.1, "only": [1]},
            "x": {},
        },
        {"run": {"directory": "b", "steps": 2}, "algorithm": {"type": "topd", "alpha": 0.2}, "name": "漢"},
        {"run": {"directory": "c", "steps": 2}, "algorithm": {"type": "topd", "alpha": 0.1}, "name": '"'},
    ]
    runs = []
    for i, table in enumerate(tables):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.toml").write_text(tomli_w.dumps(table))
        runs.append(read_run(tmp_path / str(i)))
    assert differences(runs) == [
        ("algorithm.alpha", ["0.1", "0.2", "0.1"]),
        ("algorithm.only", ["[1]", "-", "-"]),
        ("name", ["-", '"漢"', '"\\""']),
    ]
    assert differences(runs[:1]) == differences([runs[0], runs[0]]) == differences([]) == []
    (tmp_path / "0/config.toml").write_text("when = 2026-01-31\n")
    assert differences([read_run(tmp_path / "0"), runs[1]])[-1] == ("when", ['"2026-01-31"', "-"])


def test_several_runs_are_compared_on_one_page(trained: dict[str, Path], tmp_path: Path) -> None:
    html = write([trained["topd"], trained["grpo"]], tmp_path / "x.html").read_text()
    parsed = assert_inert(html)
    assert parsed.text.count("What differs between the runs") == 1
    assert (
        '<th scope="row"><code>algorithm.type</code></th><td><code>&#34;topd&#34;</code></td><td><code>&#34;grpo&#34;</code></td>'
        in html
    )
    assert "<title>topd and grpo</title>" in html
    data = data_of(html)
    assert [run["name"] for run in data["lens"]["runs"]] == ["topd", "grpo"]
    assert {trace["meta"]["run"] for chart in data["charts"] for trace in chart["figure"]["data"]} == {0, 1}
    same = Parsed(render([read_run(trained["topd"])] * 2))
    assert "All settings are the same, but for the folder." in same.text


def test_a_page_of_many_runs(folder: Path) -> None:
    assert "<title>5 runs</title>" in render([read_run(folder)] * 5, max_tokens=50)


def test_how_much_is_held_is_said(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {str(i): VECTOR for i in range(30)})
    write_step(path, {str(i): VECTOR for i in range(30)}, step=2)
    assert "(48 of the 60 prompts of 2 steps, out of 2 steps)" in words(Parsed(made(path)))
    assert "(24 of the 30 prompts of 1 steps, out of 2 steps)" in words(Parsed(made(path, steps=[2])))
    small = write_run(tmp_path / "small", {"a": VECTOR})
    assert "This page holds all rollouts." in words(Parsed(made(small)))
    both = words(Parsed(render([read_run(small), read_run(path)])))
    assert "small: 1 of the 1 prompts of 1 steps, out of 1 steps; run: 48 of the 60 prompts of 2 steps" in both


def test_rescores_have_a_section_of_their_own(folder: Path) -> None:
    assert re.search(r'<section id="rescored"[^>]* hidden>', made(folder))
    plain = write_run(folder.parent / "plain", {"a": VECTOR}, words={9: b"7"})
    rescore(plain, ("--algorithm.alpha", "0.1"))
    html = made(plain)
    assert re.search(r'<section id="rescored"[^>]*>', html)[0].endswith('"rescored-title">')
    assert "plain: alpha=0.1 (alpha 0.2 -&gt; 0.1)" in html
    assert '<a href="#rescored">Rescored</a>' in html
    assert sum(chart["section"] == "Rescored" for chart in data_of(html)["charts"]) == 3
    assert_inert(html)


def test_settings_and_environment_are_in_the_page(folder: Path) -> None:
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "9.9"}, "cpus": 2}))
    parsed = Parsed(made(folder))
    assert (folder / "config.toml").read_text() in parsed.text
    assert "versions.torch9.9" in parsed.text.replace("\n", "")


def test_a_served_page_follows_and_a_written_one_does_not(folder: Path) -> None:
    served = made(folder, watch=2.0)
    assert_inert(served, served=True)
    assert '<html lang="en" data-watch="2.0">' in served
    assert without_time(served) == served
    assert "data-watch=" not in made(folder)


def test_where_the_page_goes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_run(tmp_path / "other", {"a": VECTOR})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert write([folder]) == folder / "report.html"
    assert write([folder, folder]) == folder / "report.html"
    assert write([folder, other]) == Path("report.html")
    assert (tmp_path / "here/report.html").is_file()
    (tmp_path / "home/new").mkdir(parents=True)
    assert write([folder], "~/new/page.html") == tmp_path / "home/new/page.html"
    assert write([folder], "page.html") == Path("page.html")
    for written in (folder / "report.html", tmp_path / "home/new/page.html", tmp_path / "here/page.html"):
        assert written.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_page_leaves_the_folder_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()}
    write([folder], tmp_path / "x.html")
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("output", ["", "rollouts", "config.toml/x.html", "config.toml/deeper/x.html"])
def test_an_output_that_cannot_be_written_is_refused(folder: Path, output: str) -> None:
    with pytest.raises(ConfigError, match="--output"):
        write([folder], folder / output)
    assert not (folder / "report.html").exists()


def test_a_full_disk_leaves_the_old_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write([folder])
    before = target.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"could not be written: \[Errno 28\] No space left on device"):
            write([folder])
    assert target.read_bytes() == before
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "config",
    [
        'algorithm = "topd"',
        "teachers = 3",
        "run = 3",
        "teacher = 3\nstudent = 4",
        "[algorithm]\nalpha = []\nreward = []",
        "[rollout",
    ],
)
def test_a_configuration_of_another_shape_is_no_obstacle(folder: Path, config: str) -> None:
    (folder / "config.toml").write_text(config)
    assert_inert(made(folder))


def test_odd_numbers_are_no_obstacle(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    odd = {
        "ids": [1, 2, 3],
        "student": [-inf, 0.0, nan],
        "teacher": [-inf, -inf, -1.0],
        "token_reward": [inf, -inf, nan],
        "return": [inf] * 3,
        "advantage": [nan, inf, -inf],
        "grade": nan,
    }
    path = write_run(tmp_path / "run", {"a": [odd, {"ids": [], "student": []}]})
    write_metrics(path, [{"grade/mean": nan, "teacher/gap": -inf, "seconds/step": "x"}])
    data = data_of(made(path))
    [rollout, empty] = data["lens"]["runs"][0]["steps"][0]["groups"][0]["rollouts"]
    assert (rollout["log_ratio"], rollout["grade"]) == ([None, "-inf", None], None)
    assert empty["ids"] == []


def command(*arguments: Any) -> int:
    return main(["report", *map(str, arguments)])


def test_the_command_says_where_the_page_is(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(folder) == 0
    assert re.fullmatch(rf"report     {re.escape(str(folder / 'report.html'))}  \(\d\.\d MB\)\n", capsys.readouterr().out)
    assert command(folder, "--output", tmp_path / "x.html", "--tokens", 50, "--steps", "1") == 0
    assert len(data_of((tmp_path / "x.html").read_text())["lens"]["runs"][0]["steps"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nonsense"], "--nonsense"),
        (["--algorithm.alpha", "0.1"], "--algorithm.alpha"),
        (["--watch", "--output", "x.html"], "--output would be ignored with --watch"),
        (["--output", "."], "Give the name of a file."),
        (["--steps", "1,7"], "--steps: there are no rollouts of step 7. Stored are: 1."),
    ],
    ids=str,
)
def test_what_the_command_refuses(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert command(folder, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("topd: ")
    assert captured.out == ""
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "options", [["--tokens", "0"], ["--tokens", "x"], ["--steps", "x"], ["--steps", "0"], ["--steps", "1,,2"]]
)
def test_numbers_that_are_none_are_refused(folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(folder, *options)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {options[0]}: must be " in said
    assert f"found '{options[1]}'" in said


@pytest.mark.parametrize("watch", [[], ["--watch", "--port", "0"]], ids=["written", "watched"])
def test_a_folder_without_a_run_is_refused(folder: Path, tmp_path: Path, watch: list[str], capsys) -> None:
    assert command(folder, tmp_path / "nowhere", *watch) == 2
    assert "there is no run folder at" in capsys.readouterr().err
    assert command(tmp_path, *watch) == 2
    assert "holds no config.toml" in capsys.readouterr().err


def test_a_page_goes_through_links_and_never_over_what_is_no_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    write([folder], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a folder or a device"):
        write([folder], tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_whose_name_is_no_text_has_its_page(folder: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    odd.symlink_to(folder)
    assert write([odd], tmp_path / "odd.html").is_file()
    assert write([folder, odd, f"{folder}/"]) == folder / "report.html"  # one folder under three names
