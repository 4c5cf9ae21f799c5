"""The documentation tells the truth: its code runs, its commands run, its paths and settings exist, its pages are current."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.serving import serving
from topd import __version__, config_keys
from topd.cli import main
from topd.report.watch import make_server
from topd.run.catalogue import NAMES
from topd.run.directory import environment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHRINK = [
    *("--rollout.prompts_per_step", "4"),
    *("--trainer.minibatch_prompts", "2"),
    *("--rollout.max_completion_tokens", "8"),
    *("--eval.samples_per_problem", "2"),
    *("--eval.max_problems", "2"),
    *("--run.steps", "1"),
    *("--run.device", "cpu"),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, name(page), "exec"), namespace)
    assert namespace


def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, shrunken; `make` targets must exist, installation is what the test environment already is.

    Servers run beside, on a free port that takes the place of the page's; a report that is watched is served and closed.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"answer": "5", "completion": "3+2=5;5"}\n')
    with contextlib.ExitStack() as servers:
        _run_commands(servers)


def _run_commands(servers: contextlib.ExitStack) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran, url = 0, ""
    for line in "\n".join(blocks(ROOT / "README.md", "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert words[1] in targets
        elif "--watch" in words:
            make_server([words[2]], port=0, max_tokens=1000).server_close()
        elif words[:2] == ["topd", "serve"]:
            url = servers.enter_context(serving(words[2]))
        elif words[0] == "topd":
            words = [word.replace("http://127.0.0.1:8000/v1", url) for word in words]
            shrink = SHRINK if words[1] in ("train", "eval", "probe") else []
            assert main([*words[1:], *shrink]) == 0, line
            ran += 1
        else:
            assert words[:2] == ["pip", "install"], line
    assert ran >= 6


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_settings_and_metrics_that_are_mentioned_exist(page: Path) -> None:
    settings = {key for key, _ in config_keys.all_settings()}
    sections = {key.split(".")[0] for key in settings}
    for word in re.findall(r"`([^`\s]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.fullmatch(r"(src|tests|docs|configs|runs)/[\w/.-]+", word):
            path = ROOT / word
            assert path.exists() or (word.startswith("runs/") and "." not in word), f"{name(page)} mentions {word}"
        elif re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)", word):
            file, function = word.split("::")
            assert f"def {function}(" in (ROOT / file).read_text(), f"{name(page)} mentions {word}"
        elif re.fullmatch(r"[a-z]+\.[a-z_]+(\.[a-z_]+)*", word) and word.split(".")[0] in sections:
            is_section = any(key.startswith(word + ".") for key in settings)
            is_file = word.endswith((".py", ".toml", ".json"))
            assert word in settings or is_section or is_file, f"{name(page)} mentions the setting {word}"
        elif word.count("/") == 1 and word.split("/")[0] in {metric.split("/")[0] for metric in NAMES} - {"teacher"}:
            assert word in NAMES or word.endswith((".py", "/")), f"{name(page)} mentions the metric {word}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", page.read_text()):
            path = page.parent / target
            assert target.startswith("http") or path.exists(), f"{name(page)} links to {target}"
            assert not heading or heading in headings(path), f"{name(page)} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """Headings as links name them: lower case, blanks as hyphens, no other signs."""
    texts = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}


def test_the_tree_of_the_code_names_what_is_there() -> None:
    [tree] = re.findall(r"```\nsrc/topd/\n(.*?)^\w", (ROOT / "docs/code.md").read_text(), re.DOTALL | re.MULTILINE)
    named = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    assert {path for path in named if not (ROOT / "src/topd" / path).exists()} == set()
    stages = {f"{path.name}/" for path in (ROOT / "src/topd").iterdir() if (path / "__init__.py").is_file()}
    assert stages <= {*named, "algorithms/"}


def test_the_path_of_a_batch_is_short_enough_to_be_read() -> None:
    """The files of the table of stages in CONTRIBUTING.md, the step and the nouns; vllm.py replaces embedded.py."""
    table = [line for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    files = [re.findall(r"`(src/topd/[\w/]+\.py)`", line)[:1] for line in table[: table.index("| new | files |")]]
    path = {"src/topd/step.py", "src/topd/types.py", *(file for row in files for file in row)}
    assert len(path) == 10
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in path) <= 1200


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert {newest[1], cited[1]} == {__version__}
    assert environment()["packages"]["topd"] == __version__


def test_generated_pages_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "runs/make_docs.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_algorithm_has_a_page_with_the_same_headings() -> None:
    from topd.algorithms import available

    headings = {
        algorithm: re.findall(r"^## (.*)$", (ROOT / f"docs/algorithms/{algorithm}.md").read_text(), re.MULTILINE)
        for algorithm in available()
    }
    assert len({tuple(found) for found in headings.values()}) == 1


def test_tests_mirror_the_sources() -> None:
    """Every module of the pure core has its test file; the stages too."""
    for folder in ("ops", "algorithms", "trainer", "tasks", "models"):
        for module in (ROOT / "src/topd" / folder).glob("*.py"):
            mirrored = ROOT / "tests" / folder / f"test_{module.stem}.py"
            elsewhere = {"__init__", "base", "task", "load", "loss", "schedule", "language_model", "check", "device"}
            assert mirrored.is_file() or module.stem in elsewhere, f"{module} has no {mirrored}"
