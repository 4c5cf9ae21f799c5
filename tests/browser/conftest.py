"""A real browser on real reports. Without one these tests are skipped; with TOPD_REQUIRE_BROWSER=1 they fail.

TOPD_QUICKSTART names the folder of a finished quickstart to test on; without it a shortened one is trained.
Screenshots are left in build/screenshots/ for a person to look at.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
SHORTENED = [
    *("--rollout.prompts_per_step", "16", "--trainer.minibatch_prompts", "4", "--run.steps", "6", "--run.device", "cpu"),
    *("--eval.max_problems", "16", "--eval.samples_per_problem", "4", "--eval.every_steps", "3"),
]


def missing(why: str) -> None:
    if os.environ.get("TOPD_REQUIRE_BROWSER"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="package")
def browser() -> Iterator[object]:
    """Ends with this folder's tests: while playwright runs, asyncio.run() does not work in this thread."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        missing("playwright is not installed: `make test-browser`")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        except Error as error:
            missing(f"no browser could be started ({str(error).splitlines()[0]}): `make test-browser`")
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the page wrote to its console as an error or warning, and what it asked of strangers."""
    return []


@pytest.fixture
def tab(browser, complaints: list[str], request: pytest.FixtureRequest):
    """A fresh tab. The test fails if the page writes an error, or asks for anything beyond its own file or server."""
    options = {"viewport": {"width": 1280, "height": 900}, **getattr(request, "param", {})}
    context = browser.new_context(**options)
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request",
        lambda asked: complaints.append(asked.url) if not re.match(r"file:|data:|blob:|http://127\.0\.0\.1", asked.url) else None,
    )
    yield tab
    context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quickstart, with its report."""
    import topd

    if named := os.environ.get("TOPD_QUICKSTART"):
        return Path(named)
    folder = tmp_path_factory.mktemp("browser") / "quickstart"
    topd.train("quickstart", *SHORTENED, "--run.directory", str(folder))
    return folder


def opened(tab, page: Path | str):
    """Load a report and wait until curves and tokens can be used."""
    tab.goto(page if isinstance(page, str) else page.resolve().as_uri())
    tab.wait_for_selector("html[data-ready]")
    return tab


def colour_by(tab, stream: str) -> None:
    """As a person does: a click on the label."""
    tab.locator(f".lens-colours label:has(input[value={stream}])").click()


def picture(tab, name: str, **options: object) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=SCREENSHOTS / f"{name}.png", **options)


def draw_all(tab, most: int = 1000) -> None:
    """Scroll through the page, so that every curve is drawn, or the first ones."""
    tab.evaluate(
        """async (most) => { for (const figure of [...document.querySelectorAll("figure")].slice(0, most)) {
            figure.scrollIntoView();
            for (let i = 0; i < 100 && !figure.querySelector(".plot[data-ready]"); i++)
                await new Promise((go) => setTimeout(go, 50));
        } window.scrollTo(0, 0); }""",
        most,
    )
