"""The report for those who read it by ear, by keyboard, or on a small screen."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.browser.conftest import colour_by, draw_all, opened, picture
from tests.report.folders import VECTOR, update, write_metrics, write_run, write_step, write_updates

LONG = "an_ablation_over_alpha_and_returns_whose_name_says_everything_about_it_{}"
SIZES = [{"viewport": {"width": width, "height": 900}} for width in (400, 1280)]

NAMELESS = """() => {
    const named = (node) => (node.getAttribute("aria-label") || "").trim()
        || [...(node.labels || [])].some((label) => label.textContent.trim())
        || (!["SELECT", "INPUT"].includes(node.tagName) && node.textContent.trim()) || node.title;
    const controls = "a, button, select, input, summary, [tabindex]:not(main), [role=group], [role=region], [role=img]";
    return [...document.querySelectorAll(controls)].filter((node) => !named(node)).map((node) => node.outerHTML.slice(0, 120));
}"""

UNTITLED = """() => [...document.querySelectorAll("table")]
    .filter((table) => !(table.caption?.textContent.trim() || table.getAttribute("aria-label")))
    .map((table) => table.outerHTML.slice(0, 120))"""

BOXES = """() => [...document.querySelectorAll(".scroll")]
    .filter((box) => box.tabIndex !== 0 || !box.role || !box.ariaLabel).length"""


def folders_of_eight(quickstart: Path, root: Path) -> list[Path]:
    """The same run under eight long names, each with another alpha."""
    found = []
    for i in range(8):
        folder = root / LONG.format(i)
        shutil.copytree(quickstart, folder, ignore=shutil.ignore_patterns("checkpoints", "model", "report.html"))
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace("alpha = 0.2", f"alpha = 0.{i + 1}"))
        found.append(folder)
    return found


def check_headings(tab) -> None:
    """One h1; no level is skipped on the way down."""
    levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map((node) => Number(node.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip([0, *levels], levels, strict=False)), levels


def check_names(tab) -> None:
    draw_all(tab)
    for summary in tab.locator("summary").all():
        summary.click()
    check_headings(tab)
    assert tab.locator("table").count() > 10
    assert tab.evaluate(NAMELESS) == []
    assert tab.evaluate(UNTITLED) == []
    assert tab.evaluate(BOXES) == 0
    assert tab.locator("figure [role=img]").count() == 0
    labels = tab.locator(".modebar-btn").evaluate_all("(all) => [...new Set(all.map((one) => one.ariaLabel))]")
    assert labels == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]  # and nothing that shares


def test_everything_has_a_name_and_headings_skip_no_level(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    check_names(tab)
    assert re.match("(good|note|warning|bad): ", tab.locator(".verdict h3").first.text_content())
    label = tab.locator("#chart-gap .plot").get_attribute("aria-label")
    assert label.startswith("Gap to the teacher. ")
    assert "step 1" in label


def test_rescored_tables_have_names_too(tab, quickstart: Path, tmp_path: Path) -> None:
    import topd
    from topd.report.page import write

    run = tmp_path / "run"
    shutil.copytree(quickstart, run)
    topd.rescore(run, "--algorithm.alpha", "0.5")
    opened(tab, write([run]))
    check_names(tab)


@pytest.fixture(scope="module")
def eight(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return folders_of_eight(quickstart, tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def page_of_eight(eight: list[Path]) -> Path:
    from topd.report.page import write

    return write(eight, eight[0].parent / "eight.html")


@pytest.mark.parametrize("tab", SIZES, indirect=True, ids=["narrow", "wide"])
def test_eight_runs_with_long_names(tab, page_of_eight: Path) -> None:
    """One legend for all curves; the page does not scroll to the side; the first numbers of the result are on the screen."""
    opened(tab, page_of_eight)
    draw_all(tab, most=5)
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.locator("#legend li").all_inner_texts() == [LONG.format(i) for i in range(8)]
    assert tab.locator("#legend svg path").evaluate_all("(all) => new Set(all.map((one) => one.getAttribute('d'))).size") == 8
    assert tab.locator(".plot .legend").count() == 0
    assert LONG.format(7) in tab.locator("#chart-gap .plot").get_attribute("aria-label")
    assert LONG.format(7) not in tab.locator("#chart-gap p").inner_text()
    for place in ("#legend li", ".lens-controls select", ".lens-controls label", ".headline tbody strong"):
        for node in tab.locator(place).all():
            box = node.bounding_box()
            assert box["x"] >= 0, place
            assert box["x"] + box["width"] <= width, place
    check_headings(tab)
    picture(tab, f"eight-runs-{width}", full_page=True)


def test_the_tab_stop_of_a_completion_says_its_numbers(tab, tmp_path: Path) -> None:
    """A name on the focused token alone; the panel, which also follows the mouse, is not read out."""
    from topd.report.page import write

    reward = {"token_reward": [-0.22314, 0.1, 0.0]}
    folder = write_run(tmp_path / "run", {"a": [{**VECTOR[0], **reward}]}, words={9: b"two", 14: b" ", 1: b"<end>"})
    write_updates(folder, update(1, [1.0, 1.5, 1.0], [False, True, False]))
    opened(tab, write([folder]))
    token = tab.locator(".lens-token[data-position='0']")
    token.focus()
    assert token.get_attribute("aria-label").startswith(
        "token 0, two, log-ratio 0.2, token reward \u22120.223, return 0, advantage "
    )
    tab.keyboard.press("ArrowRight")
    label = tab.evaluate("document.activeElement.ariaLabel")
    assert label.startswith("token 1, space, log-ratio \u22121, token reward 0.1, ")
    assert label.endswith(", clipped")
    assert tab.evaluate("document.activeElement.role") == "button"
    assert token.get_attribute("aria-label") is None
    assert tab.locator(".lens-grid [aria-label^='token']").count() == 1
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.ariaPressed") == "true"
    assert tab.evaluate("document.querySelector('.lens-details').closest('[aria-live], [role=status]')") is None


def test_units_and_lists_are_those_of_the_run(tab, tmp_path: Path) -> None:
    """Without a teacher: rewards are grades, nothing is rejected, and what only a teacher gives is not there."""
    from topd.report.credit import streams_of
    from topd.report.page import write
    from topd.report.stored import read_run

    completion = {"ids": [9, 14], "student": [-0.5, -1.0], "token_reward": [0.0, 1.0], "return": [1.0, 1.0], "grade": 1.0}
    groups = {"a": [{**completion, "advantage": [0.5, 0.7]}, {**completion, "advantage": [-0.5, -0.7]}]}
    folder = write_run(tmp_path / "run", groups, algorithm={"type": "grpo"}, words={9: b"two", 14: b"!"})
    opened(tab, write([folder]))
    units = {stream.key: stream.unit for stream in streams_of(read_run(folder))}
    assert units["token_reward"] == "grade"
    assert "The credit that every sampled token got." in tab.locator("#tokens p").first.inner_text()
    tab.locator(".lens-token[data-position='1']").first.hover()
    assert tab.locator(".lens-colours input").evaluate_all("(all) => all.map((one) => one.value)") == list(units)[1:]
    for key, unit in list(units.items())[1:]:
        assert tab.locator(f".lens-details dd:has([data-field={key}]) small").inner_text().strip() == unit
        colour_by(tab, key)
        assert f"({unit}):" in tab.locator(".lens-legend").inner_text()
    assert not tab.locator(".lens-details [data-field=teacher_logprob]").is_visible()
    assert tab.locator("[data-list=worst]").count() == 0
    titles = tab.locator(".lens-lists h3").all_inner_texts()
    assert "Worst rejected" not in titles
    assert len(titles) == tab.locator(".lens-lists ol").count()
    if titles:
        assert f"({units['advantage']})" in tab.locator(".lens-lists p").first.inner_text()


def test_the_command_for_other_tokens_can_be_pasted(tab, tmp_path: Path) -> None:
    from topd.report.page import write

    extreme = {"ids": [9] * 64, "student": [-0.5] * 64, "teacher": [-9.0] * 64}
    groups = {f"p{i}": [extreme] for i in range(40)}
    folder = write_run(tmp_path / "it's a run", groups, words={9: b"two"})
    late = {**extreme, "ids": [9] * 200, "student": [-0.5] * 200, "teacher": [-0.5] * 199 + [-30.0]}
    write_step(folder, {**groups, "p40": [late]})
    opened(tab, write([folder], max_tokens=64))
    command = tab.locator("[data-list=worst] code").first.inner_text()
    assert shlex.split(command) == ["topd", "explain", str(folder), "--step", "1", "--group", "40"]


def test_shades_grow_with_the_square_root(tab, tmp_path: Path) -> None:
    """A quarter of the scale has half of the shades, a hundredth a tenth; the ticks and the floor stand at their shades."""
    from topd.report.page import write

    sizes = [0.0, 0.01, 0.0625, 0.25, 1.0]
    teacher = [-1.0 + sign * 8 * size for sign in (1, -1) for size in sizes] + [7.0] * 90
    reward = [0.0, 0.1, -0.05] + [0.0] * 97
    completion = {"ids": [9] * 100, "student": [-1.0] * 100, "teacher": teacher, "token_reward": reward}
    opened(tab, write([write_run(tmp_path / "run", {"a": [completion]}, words={9: b"two"})]))
    shades = [1, 2.5, 5, 10]
    for first, side in ((0, "up"), (5, "down")):
        classes = [tab.locator(f".lens-token[data-position='{first + i}']").get_attribute("class") for i in range(5)]
        assert not any(f"lens-{side}" in classes[0] for side in ("up", "down"))
        for name, shade in zip(classes[1:], shades, strict=True):
            assert f"lens-{side}-{int(shade + 0.5)}" in name.split(), (name, shade)
    assert tab.locator(".lens-ticks span").all_inner_texts() == ["\u22128", "\u22122", "0", "+2", "+8"]
    assert "square root" in tab.locator(".lens-legend p").inner_text()
    assert "99th percentile" in tab.locator(".lens-legend p").inner_text()
    ticks = [middle(box) for box in boxes(tab, ".lens-ticks span")]
    cells = [middle(box) for box in boxes(tab, ".lens-bar i")]
    assert ticks == pytest.approx([cells[0], cells[5], cells[10], cells[15], cells[20]], abs=1)
    colour_by(tab, "token_reward")
    floor = boxes(tab, ".lens-floor")[0]["x"]
    assert cells[0] - 1 <= floor <= cells[1]  # log(1 - 0.2) = -0.223 is the end of this scale


def boxes(tab, place: str) -> list[dict[str, float]]:
    return [node.bounding_box() for node in tab.locator(place).all()]


def middle(box: dict[str, float]) -> float:
    return box["x"] + box["width"] / 2


@pytest.mark.parametrize("tab", SIZES[:1], indirect=True, ids=["narrow"])
def test_the_empty_panel_does_not_cover_the_completions(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    position = "getComputedStyle(document.querySelector('.lens-details')).position"
    assert tab.evaluate(position) == "static"
    tab.locator(".lens-token[tabindex]").first.focus()
    assert tab.evaluate(position) == "sticky"


@pytest.mark.parametrize("tab", [{"forced_colors": "active"}], indirect=True, ids=["forced"])
def test_what_is_below_zero_is_underlined_where_colours_are_not_drawn(tab, quickstart: Path) -> None:
    opened(tab, quickstart / "report.html")
    assert tab.evaluate("matchMedia('(forced-colors: active)').matches")
    tokens = tab.locator(".lens-grid .lens-token[class*='lens-down']")
    assert tokens.count() > 0
    lines = tokens.evaluate_all("(all) => all.map((one) => getComputedStyle(one).textDecorationLine)")
    assert all("underline" in line for line in lines)


def test_small_numbers_are_written_with_an_exponent(tab, tmp_path: Path) -> None:
    from topd.report.page import write

    folder = write_run(tmp_path / "run", {"a": VECTOR})
    write_metrics(folder, [{"policy/mismatch_kl": 4e-13}, {"policy/mismatch_kl": 6e-11}, {"policy/mismatch_kl": 5e-12}])
    opened(tab, write([folder]))
    draw_all(tab)
    labels = tab.locator("#chart-mismatch .ytick").all_text_contents()
    assert labels
    assert all(not label.strip()[-1:].isalpha() for label in labels), labels


def test_five_thousand_tokens_change_their_colour_at_once(tab, tmp_path: Path) -> None:
    from topd.report.page import write

    values = [((i * 37) % 100 - 50) / 10 for i in range(1000)]
    completion = {
        "ids": [9] * 1000,
        "student": [-6.0] * 1000,
        "teacher": [value - 6 for value in values],
        "token_reward": values[::-1],
    }
    folder = write_run(tmp_path / "run", {"a": [completion] * 5}, words={9: b"two "})
    opened(tab, write([folder]))
    assert tab.locator(".lens-grid .lens-token").count() == 5000
    taken = tab.evaluate(
        """() => ["token_reward", "log_ratio", "token_reward", "log_ratio", "token_reward"].map((value) => {
            const began = performance.now();
            document.querySelector(`.lens-colours input[value=${value}]`).click();
            document.body.offsetHeight;
            return performance.now() - began;
        })"""
    )
    print(json.dumps(taken))
    assert sorted(taken)[2] < 100


@pytest.mark.parametrize("tab", SIZES[:1], indirect=True, ids=["narrow"])
def test_numbers_under_the_mouse_fit_beside_long_names(tab, eight: list[Path], tmp_path: Path) -> None:
    from topd.report.page import write

    opened(tab, write(eight[:3], tmp_path / "three.html"))
    plot = tab.locator("#chart-gap .plot")
    plot.scroll_into_view_if_needed()
    tab.locator("#chart-gap .plot[data-ready]").wait_for()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#chart-gap .hoverlayer text")
    for line in tab.locator("#chart-gap .hoverlayer .traces text").all():
        assert box["x"] <= line.bounding_box()["x"]
    assert "about_it_2" in tab.locator("#chart-gap .hoverlayer").text_content()
    picture(tab, "hover-narrow")
