"""The report of a quickstart in Chromium: what a person sees and does, against the files of the run."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.browser.conftest import colour_by, draw_all, opened, picture

WIDE_DARK = {"color_scheme": "dark"}
NARROW = {"viewport": {"width": 400, "height": 800}}


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def stored(folder: Path, step: int, group: int, rollout: int) -> tuple[dict, dict]:
    """A completion's row in the two parquet files, read without the report's own reader."""
    table = pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()
    prompt = list(dict.fromkeys(row["prompt_id"] for row in table))[group]
    row = [row for row in table if row["prompt_id"] == prompt][rollout]
    updates = pq.read_table(folder / f"updates/step_{step:06d}.parquet").to_pylist()
    seen = [each for each in updates if (each["prompt_id"], each["rollout"]) == (prompt, rollout)]
    return row, seen[-1]


def details(tab) -> dict[str, str]:
    """What the panel says about the token that is pointed at."""
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".lens-details [data-field]")]
            .map((element) => [element.dataset.field, element.dataset.value]))"""
    )


def check_details(tab, folder: Path, step: int, group: int, rollout: int, position: int) -> None:
    row, seen = stored(folder, step, group, rollout)
    shown = details(tab)
    log_ratio = row["teacher_logprobs"][position] - row["behaviour_logprobs"][position]
    expected = {
        "token_id": row["completion_ids"][position],
        "position": position,
        "behaviour_logprob": row["behaviour_logprobs"][position],
        "teacher_logprob": row["teacher_logprobs"][position],
        "log_ratio": log_ratio,
        "probability_ratio": math.exp(log_ratio),
        "token_reward": row["token_rewards"][position],
        "return": row["returns"][position],
        "advantage": row["advantages"][position],
        "importance_ratio": seen["importance_ratios"][position],
        "clipped": seen["clipped"][position],
    }
    for field, value in expected.items():
        found = shown[field]
        if field == "clipped":
            assert found in ("1", "true") if value else found in ("0", "false"), field
        else:
            assert float(found) == pytest.approx(value, rel=2e-5, abs=1e-6), field


def chosen(tab) -> tuple[int, int]:
    """Step and group that the lens shows."""
    return tuple(int(tab.locator(f"[data-control={name}]").input_value()) for name in ("step", "prompt"))


def test_the_page_shows_the_result_of_the_run_and_asks_for_nothing(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    table = tab.locator(".headline tbody tr").all_inner_texts()
    evaluations = rows(quickstart, "evals.jsonl")
    last = max(row["step"] for row in evaluations)
    for words, model, step in zip(table, ("student", "student", "teacher"), (0, last, 0), strict=True):
        row = next(row for row in evaluations if (row["model"], row["step"]) == (model, step))
        low, high = row["ci95"]
        assert f"{row['avg_at_k']:.1%}" in words
        assert f"{low:.1%} to {high:.1%}" in words
    assert (quickstart / "report.html").stat().st_size < 5e6
    draw_all(tab)
    picture(tab, "report-wide", full_page=True)


def test_curves_hold_every_number_and_say_it_on_hover(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    draw_all(tab)
    gap = [row["teacher/gap"] for row in rows(quickstart, "metrics.jsonl")]
    assert tab.evaluate("document.querySelector('#chart-gap .plot').data[0].y") == pytest.approx(gap)
    figure = tab.locator("#chart-gap")
    figure.scroll_into_view_if_needed()
    point = figure.locator("path.point").last.bounding_box()
    tab.mouse.move(point["x"] + 2, point["y"] + 2)
    tab.wait_for_selector("#chart-gap .hoverlayer text")
    assert f"{gap[-1]:.4g}" in figure.locator(".hoverlayer").text_content()
    assert figure.locator(".ytitle").text_content() == "nats per token"
    assert figure.locator(".xtitle").text_content() == "step"


def test_every_chart_has_its_numbers_as_table_and_csv(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    metrics = rows(quickstart, "metrics.jsonl")
    figure = tab.locator("#chart-ratio")
    figure.get_by_text("Numbers").click()
    figure.locator("tbody tr").nth(len(metrics) - 1).wait_for()
    assert figure.locator("tbody tr").count() == len(metrics)
    with tab.expect_download() as download:
        figure.get_by_role("button", name="Save as CSV").click()
    lines = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    for name in ("ratio/p01", "ratio/p50", "ratio/p99"):
        assert [float(line[f"{name} (ratio)"]) for line in lines] == pytest.approx([row[name] for row in metrics])
    assert len(tab.locator("figure").all()) == len(tab.locator("figure summary").all()) > 15


def test_curves_can_be_drawn_over_tokens(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    draw_all(tab)
    tab.locator("#axis").select_option("tokens")
    tab.wait_for_function("() => document.querySelector('#chart-gap .plot').layout.xaxis.title.text === 'completion tokens'")
    expected = [row["tokens/total"] for row in rows(quickstart, "metrics.jsonl")]
    assert tab.evaluate("document.querySelector('#chart-gap .plot').data[0].x") == expected


def test_hovering_a_token_says_what_the_run_stored(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    step, group = chosen(tab)
    for rollout, position in ((0, 0), (1, 3), (2, 5)):
        tab.locator(f".lens-token[data-rollout='{rollout}'][data-position='{position}']").hover()
        check_details(tab, quickstart, step, group, rollout, position)
    picture(tab, "lens-hover")


def test_tokens_can_be_read_with_the_keyboard_alone(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    step, group = chosen(tab)
    tab.locator(".lens-colours input:checked").focus()
    for _ in range(3):  # out of the controls and into the first completion
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('lens-token')"):
            break
    tab.keyboard.press("Home")
    for position in range(1, 4):
        tab.keyboard.press("ArrowRight")
        check_details(tab, quickstart, step, group, 0, position)
    tab.keyboard.press("ArrowDown")
    check_details(tab, quickstart, step, group, 1, 3)
    picture(tab, "lens-focus")


def test_every_control_can_be_reached_with_the_keyboard(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    draw_all(tab)
    reached = set()
    for _ in range(400):
        tab.keyboard.press("Tab")
        name = tab.evaluate("((e) => e.id || e.dataset.control || e.name || e.className || e.tagName)(document.activeElement)")
        if name == "BODY":
            break
        reached.add(name)
    assert {"theme", "axis", "step", "prompt"} <= reached
    assert any("lens-token" in str(name) for name in reached)


@pytest.mark.parametrize("stream", ["log_ratio", "token_reward", "return", "advantage"])
def test_colours_follow_the_chosen_stream(tab, quickstart: Path, stream: str) -> None:
    """Blue above 0, orange below: checked on the extreme tokens of the group, by the hue that is really on the screen."""
    opened(tab, quickstart / "report.html")
    colour_by(tab, stream)
    step, group = chosen(tab)
    table = pq.read_table(quickstart / f"rollouts/step_{step:06d}.parquet").to_pylist()
    prompt = list(dict.fromkeys(row["prompt_id"] for row in table))[group]
    own = [row for row in table if row["prompt_id"] == prompt]
    column = {"token_reward": "token_rewards", "return": "returns", "advantage": "advantages"}.get(stream)
    values = {
        (i, k): value
        for i, row in enumerate(own)
        for k, value in enumerate(row[column] if column else np.subtract(row["teacher_logprobs"], row["behaviour_logprobs"]))
    }
    for (rollout, position), sign in ((max(values, key=values.get), 1), (min(values, key=values.get), -1)):
        if sign * values[rollout, position] < 1e-3:
            continue
        token = tab.locator(f".lens-token[data-rollout='{rollout}'][data-position='{position}']")
        red, _, blue = tab.evaluate(
            "(e) => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)", token.element_handle()
        )
        assert sign * (blue - red) >= 0
    assert ("floor" in tab.locator(".lens-legend").inner_text()) == (stream == "token_reward")
    picture(tab, f"lens-{stream}")


def test_the_lists_lead_to_the_extreme_tokens_of_the_whole_step(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    step, _ = chosen(tab)
    table = pq.read_table(quickstart / f"rollouts/step_{step:06d}.parquet").to_pylist()
    lowest = min(float(np.subtract(row["teacher_logprobs"], row["behaviour_logprobs"]).min()) for row in table)
    highest = max(max(row["advantages"]) for row in table)
    for name, field, value in (("worst", "log_ratio", lowest), ("credited", "advantage", highest)):
        tab.locator(f"[data-list={name}] button").first.click()
        assert tab.evaluate("document.activeElement.classList.contains('lens-token')")
        assert float(details(tab)[field]) == pytest.approx(value, rel=1e-5)
        _, group = chosen(tab)
        place = tab.evaluate("[document.activeElement.dataset.rollout, document.activeElement.dataset.position].map(Number)")
        check_details(tab, quickstart, step, group, *place)


@pytest.mark.parametrize("tab", [NARROW, {**NARROW, **WIDE_DARK}], indirect=True, ids=["light", "dark"])
def test_a_narrow_screen_needs_no_scrolling_to_the_side(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    draw_all(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    picture(tab, f"report-narrow-{tab.evaluate('matchMedia(`(prefers-color-scheme: dark)`).matches')}".lower(), full_page=True)


def luminance(color: list[float]) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


LEGIBLE = ".lens-token, .lens-newline, .lens-mark, .verdict p, .verdict .level, .muted, .lens-note, .lens small, td, th, figure p"

EVERY_SHADE = """() => {
    const line = document.querySelector(".lens-grid .lens-line");
    for (const side of ["up", "down"]) for (let i = 1; i <= 10; i++) {
        const token = document.createElement("span");
        token.className = `lens-token lens-${side}-${i}`;
        for (const [kind, text] of [["newline", "\u23ce"], ["mark", "NUL"]]) {
            const badge = token.appendChild(document.createElement("span"));
            badge.className = `lens-${kind}`;
            badge.textContent = text;
        }
        line.append(token);
    }
}"""

COLOURS = """(selector) => {
    const numbers = (color) => {
        const found = color.match(/-?[\\d.]+(?:e-?\\d+)?/g).map(Number);
        const whole = color.startsWith("color") ? 255 : 1;
        return [...found.slice(0, 3).map((x) => whole * x), found[3] ?? 1];
    };
    const over = (above, below) => below.slice(0, 3).map((x, i) => above[3] * above[i] + (1 - above[3]) * x);
    return [...document.querySelectorAll(selector)].map((element) => {
        let back = numbers(getComputedStyle(document.body).backgroundColor);
        const path = [];
        for (let at = element; at; at = at.parentElement) path.unshift(at);
        for (const at of path) back = over(numbers(getComputedStyle(at).backgroundColor), back);
        return [over(numbers(getComputedStyle(element).color), back), back, element.className];
    });
}"""


@pytest.mark.parametrize("tab", [{}, WIDE_DARK], indirect=True, ids=["light", "dark"])
def test_text_is_legible_on_every_colour(tab, quickstart: Path) -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2, AA), as computed by the browser; what shines through a colour counts."""
    opened(tab, quickstart / "report.html")
    picture(tab, f"lens-{'dark' if tab.evaluate('matchMedia(`(prefers-color-scheme: dark)`).matches') else 'light'}")
    tab.evaluate(EVERY_SHADE)
    found = tab.evaluate(COLOURS, LEGIBLE)
    assert sum(name == "lens-newline" for _, _, name in found) >= 20
    assert len({tuple(map(round, back)) for _, back, name in found if "lens-token" in name}) >= 20
    for text, back, name in found:
        light, dark = sorted((luminance(text), luminance(back)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, back, name)


def test_the_theme_can_be_chosen(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("#theme").click()
    tab.locator("#theme").click()
    assert tab.locator("#theme").inner_text() == "Theme: dark"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_two_runs_are_laid_over_each_other_with_their_differences(tab, quickstart: Path, tmp_path: Path) -> None:
    import shutil

    from topd.report.page import write

    other = tmp_path / "other"
    shutil.copytree(quickstart, other)
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace("alpha = 0.2", "alpha = 0.1"))
    metrics = rows(other, "metrics.jsonl")
    lines = [json.dumps({**row, "teacher/gap": 2 * row["teacher/gap"]}) + "\n" for row in metrics]
    (other / "metrics.jsonl").write_text("".join(lines))
    (other / "digests.jsonl").unlink()  # of the lines that were
    opened(tab, write([quickstart, other], tmp_path / "both.html"))
    draw_all(tab)
    traces = tab.evaluate("document.querySelector('#chart-gap .plot').data.map(t => [t.name, t.y])")
    assert [name for name, _ in traces] == [quickstart.name, "other"]
    assert traces[1][1] == pytest.approx([2 * y for y in traces[0][1]])
    assert traces[0][1] != traces[1][1]
    differences = tab.locator("#settings table").first.inner_text()
    assert "algorithm.alpha" in differences
    assert "0.1" in differences
    assert "run.steps" not in differences
    picture(tab, "two-runs", full_page=True)


def test_what_was_rescored_is_shown(tab, quickstart: Path, tmp_path: Path) -> None:
    import shutil

    import topd
    from topd.report.page import write

    run = tmp_path / "run"
    shutil.copytree(quickstart, run)
    found = topd.rescore(run, "--algorithm.alpha", "0.5")
    opened(tab, write([run]))
    draw_all(tab)
    section = tab.locator("#rescored")
    assert f"{found['overall']['pearson']:.4f}" in section.inner_text()
    assert len(section.locator("figure").all()) == 3
    histogram = tab.evaluate(
        "[...document.querySelectorAll('#rescored .plot')].map(p => p.data).find(d => d[0].type === 'bar')[1].y"
    )
    assert histogram == found["histogram"]["new"]
    section.scroll_into_view_if_needed()
    picture(tab, "rescored")
