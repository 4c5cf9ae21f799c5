"""`topd report --watch` in Chromium, beside a run that is killed and goes on."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from tests.browser.conftest import colour_by, opened
from tests.e2e.tiny import tiny_config
from tests.processes import Topd
from tests.report.folders import VECTOR, write_metrics, write_run


@contextlib.contextmanager
def running(*words: str) -> Iterator[Topd]:
    process = Topd(*words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_page_follows_a_run_that_is_killed_and_resumed(tab, tmp_path: Path) -> None:
    """The reader's choices stay; half a line at the end is left out; the page takes up the run again."""
    folder = tmp_path / "run"
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(tiny_config(folder, run__steps=400, run__checkpoint_every=1, eval__every_steps=0)))
    with running("train", str(config)) as train:
        while not re.match(r"step +2/", train.stdout.readline()):
            assert train.poll() is None
        with running("report", str(folder), "--watch", "--port", "0") as report:
            url = report.stdout.readline().split()[0]
            opened(tab, url)
            assert "not finished" in tab.locator(".lead").inner_text()
            tab.locator("[data-control=step]").select_option("1")
            tab.locator("[data-control=prompt]").select_option("2")
            colour_by(tab, "advantage")
            tab.get_by_text("Configuration, resolved").click()

            first = steps_in(tab)
            tab.wait_for_function(f"() => {STEPS} > {first + 1}")
            train.kill()
            train.wait()
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 40')
            done = len([line for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")])
            tab.wait_for_function(f"() => {STEPS} === {done}")
            assert tab.locator("[data-control=step]").input_value() == "1"
            assert tab.locator("[data-control=prompt]").input_value() == "2"
            assert tab.locator(".lens-colours input:checked").get_attribute("value") == "advantage"
            assert tab.locator("#settings details").first.get_attribute("open") is not None
            assert tab.evaluate("document.querySelector('#chart-gap').isConnected")

            with running("train", str(config), "--run.resume", "true"):
                tab.wait_for_function(f"() => {STEPS} > {done}")
            newest = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
            assert newest["step"] > done


STEPS = "Number(document.querySelector('.lead').textContent.match(/(\\d+) of \\d+ steps/)[1])"


def steps_in(tab) -> int:
    return int(tab.evaluate(STEPS))


def test_a_page_whose_server_has_gone_says_so(tab, quickstart: Path, complaints: list[str]) -> None:
    with running("report", str(quickstart), "--watch", "--port", "0") as report:
        opened(tab, report.stdout.readline().split()[0])
    tab.get_by_text("does not answer").wait_for()
    assert complaints
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in complaints)
    complaints.clear()


def test_news_keep_what_is_open_and_focused_and_silence_is_kept_without_news(tab, tmp_path: Path) -> None:
    """As long as nothing is new the page is not loaded again, and its status is not touched: it would be read out."""
    folder = write_run(tmp_path / "run", {"a": VECTOR}, words={9: b"two"})
    rows = [{"teacher/gap": 0.5, "seconds/step": 1.0}, {"teacher/gap": 0.25, "seconds/step": 1.0}]
    write_metrics(folder, rows)
    asked: list[str] = []
    with running("report", str(folder), "--watch", "--port", "0") as report:
        opened(tab, report.stdout.readline().split()[0])
        tab.on("request", lambda request: asked.append(request.url.rsplit("/", 1)[1]))
        tab.evaluate(
            """() => { window.changes = 0;
                new MutationObserver(() => window.changes++)
                    .observe(document.querySelector("#live"), { childList: true, characterData: true, subtree: true }); }"""
        )
        tab.locator("#chart-gap .plot[data-ready]").wait_for()
        tab.locator("#settings summary", has_text="Environment").click()
        tab.locator("#settings summary", has_text="Configuration").focus()
        tab.wait_for_timeout(5000)
        assert asked.count("state") >= 2
        assert "" not in asked
        assert tab.evaluate("window.changes") == 0

        (folder / "environment.json").write_text(json.dumps({"where": "elsewhere"}))
        write_metrics(folder, [*rows, {"teacher/gap": 0.125, "seconds/step": 1.0}])
        tab.get_by_text(re.compile(r"newest data from \d\d:\d\d:\d\d")).wait_for()
        assert tab.locator("#settings td", has_text="elsewhere").is_visible()
        assert tab.evaluate("[document.activeElement.localName, document.activeElement.textContent]") == [
            "summary",
            "Configuration, resolved",
        ]
        assert tab.locator("#settings details[open] summary").all_inner_texts() == ["Environment"]
        assert "0.125 at step 3" in tab.locator("#chart-gap .plot").get_attribute("aria-label")
        tab.wait_for_timeout(4500)
        assert tab.evaluate("window.changes") == 1
