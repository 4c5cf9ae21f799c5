"""What a model, a prompt or a folder name says is text, and nothing else."""

from pathlib import Path

import pytest

from tests.browser.conftest import colour_by, draw_all, opened, picture
from tests.report.folders import write_run

SCRIPT = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
WORDS = {
    0: b"plain",
    1: SCRIPT.encode(),
    2: b"<svg onload=window.pwned=3>",
    3: b"javascript:window.pwned=4 {{7*7}} ${7*7} <!-- ]]>",
    4: b"\x1b[31mred\x1b]0;title\x07",
    5: b"\x00\x01\x7f\r\b",
    6: "\u202egnp.exe\u2066".encode(),
    7: b"x" * 1_000_000,
    8: ("Z" + "\u0334\u0335\u0336" * 200).encode(),
    9: "שלום".encode(),
    10: " עולם".encode(),
    11: "\U0001f469\u200d\U0001f680".encode()[:5],
    12: "\U0001f469\u200d\U0001f680".encode()[5:],
    13: b"\xff\xfe",
    14: b"\n",
    15: b" " * 40,
    16: "漢字かな".encode(),
    17: "مرحبا".encode(),
    18: b"\xe4\xbd",
    19: b"\xa0",
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    from topd.report.page import write

    ids = list(WORDS)
    flat = [-1.0] * len(ids)
    completions = [
        {
            "ids": ids,
            "student": flat,
            "teacher": [-float("inf") if i == 1 else -1.5 for i in ids],
            "advantage": [float(i - 9) for i in ids],
        },
        {"ids": [9, 10, 9, 14, 17, 0], "student": [-1.0] * 6, "teacher": [-0.5] * 6},
    ]
    folder = tmp_path / "<img src=x onerror=window.pwned=5>"
    write_run(folder, {SCRIPT: completions}, words=WORDS, prompt=SCRIPT, answer=SCRIPT, domain=SCRIPT, completion=SCRIPT)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config + "[student]\nname = '''" + SCRIPT + "'''\n")
    (folder / "environment.json").write_text('{"<script>window.pwned=6</script>": "</td><script>window.pwned=7</script>"}')
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "teacher/gap": "<script>window.pwned=8</script>", "grade/mean": 0.5}\nnot json\n'
    )
    return write([folder])


@pytest.mark.parametrize("tab", [{}, {"viewport": {"width": 400, "height": 800}}], indirect=True, ids=["wide", "narrow"])
def test_nothing_executes_and_nothing_breaks_the_layout(tab, hostile: Path) -> None:
    opened(tab, hostile)
    draw_all(tab)
    for stream in ("log_ratio", "token_reward", "return", "advantage"):
        colour_by(tab, stream)
    for position in range(len(WORDS)):
        tab.locator(f".lens-token[data-rollout='0'][data-position='{position}']").first.hover(timeout=3000)
    for button in tab.locator("[data-list] button:enabled").all():
        button.click()
    for summary in tab.locator("summary").all():
        summary.click()
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.pwned") is None
    assert len(tab.locator("#lens img, #lens svg, #lens script, main img").all()) == 0
    assert tab.evaluate("document.documentElement.scrollWidth") == tab.viewport_size["width"]
    assert "<script>window.pwned = 1</script>" in tab.locator(".lens-grid").inner_text()
    picture(tab, f"hostile-{tab.viewport_size['width']}", full_page=True)


def test_the_policy_stops_a_script_that_got_in(tab, hostile: Path, tmp_path: Path) -> None:
    """Were the escaping to fail, the page's policy would still refuse the script."""
    page = hostile.read_text().replace(
        "<main", "<script>window.pwned = 9</script><img src=x onerror='window.pwned = 10'><main", 1
    )
    (tmp_path / "broken.html").write_text(page)
    context = tab.context.browser.new_context()
    other = context.new_page()
    refused: list[str] = []
    other.on("console", lambda message: refused.append(message.text))
    opened(other, tmp_path / "broken.html")
    assert other.evaluate("window.pwned") is None
    assert any("Content Security Policy" in text for text in refused)
    context.close()


def test_what_has_no_glyph_is_spelled_out(tab, hostile: Path) -> None:
    opened(tab, hostile)
    shown = {
        position: tab.locator(f".lens-token[data-rollout='0'][data-position='{position}']").first.inner_text()
        for position in range(len(WORDS))
    }
    assert "ESC" in shown[4]
    assert "NUL" in shown[5]
    assert "U+202E" in shown[6]
    assert "bytes" in shown[7]
    assert len(shown[7]) < 300
    assert shown[13].split() == ["FF", "FE"]
    assert "漢字かな" in shown[16]
    assert shown[18].split() == ["E4", "BD"]
    assert "\u4f60" in shown[19]  # the character that tokens 18 and 19 make together


def test_right_to_left_text_runs_from_right_to_left(tab, hostile: Path) -> None:
    """Three Hebrew words: the first is the rightmost on the screen; the Latin word of the next line begins at its own side."""
    opened(tab, hostile)
    left = [
        tab.locator(f".lens-token[data-rollout='1'][data-position='{position}']").first.bounding_box()["x"]
        for position in (0, 1, 2)
    ]
    assert left[0] > left[1] > left[2]
    arabic = tab.locator(".lens-token[data-rollout='1'][data-position='4']").first.bounding_box()["x"]
    latin = tab.locator(".lens-token[data-rollout='1'][data-position='5']").first.bounding_box()["x"]
    assert arabic > latin
    tab.locator(".lens-grid").screenshot(path=None)
