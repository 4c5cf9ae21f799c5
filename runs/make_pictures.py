"""Make the pictures of the read-me from the report of a finished quickstart: python runs/make_pictures.py [runs/quickstart]

Needs a browser (`make browser`). Writes docs/pictures/report.png and docs/pictures/lens.png.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def report(page: Page) -> None:
    """The top of the page, with the first curves drawn."""
    page.locator("#curves h3").first.scroll_into_view_if_needed()
    for name in ("accuracy-held_out", "grade", "grade-spread", "gap", "log-ratio", "token-reward"):
        page.locator(f"#chart-{name} .plot[data-ready]").wait_for(timeout=20_000)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=PICTURES / "report.png", clip={"x": 0, "y": 0, "width": 1280, "height": 1240}, full_page=True)


def lens(page: Page) -> None:
    """The tokens of an early step, coloured by what the teacher thinks of them, with one of the worst-rejected pointed at."""
    page.locator("[data-control=step]").select_option("1")
    page.locator("[data-list=worst] button:enabled").first.click()
    page.wait_for_timeout(2500)  # until the highlight has gone
    page.add_style_tag(content=".top { display: none; }")
    box = page.locator("#lens").bounding_box()
    assert box is not None
    clip = {"x": 0, "y": box["y"] + page.evaluate("scrollY") - 16, "width": 1280, "height": 960}
    page.screenshot(path=PICTURES / "lens.png", clip=clip, full_page=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto((folder / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready]")
        report(page)
        lens(page)
        browser.close()


if __name__ == "__main__":
    main()
