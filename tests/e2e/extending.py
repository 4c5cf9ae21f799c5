"""The worked examples of docs/extending.md, as files."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/extending.md"


def modules() -> dict[str, str]:
    """Path -> source of every module on the page."""
    sources = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {source.split("\n", 1)[0].removeprefix("# "): source for source in sources}


def toml() -> str:
    [config] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return config
