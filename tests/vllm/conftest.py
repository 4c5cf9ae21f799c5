"""Tests against a real vLLM, in an environment of its own: `make test-vllm`. Left out unless TOPD_VLLM_PYTHON names its Python.

They end with a table of what was measured, as docs/results.md shows it.
"""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TOPD_VLLM_PYTHON") else ["test_*.py"]

MEASURED: dict[str, dict[str, str]] = {}


@pytest.fixture
def measured(request):
    """(model, name, value): a cell of the table at the end."""

    def add(model: str, name: str, value: object) -> None:
        MEASURED.setdefault(name, {})[model] = str(value)

    return add


def pytest_terminal_summary(terminalreporter):
    if not MEASURED:
        return
    models = list(dict.fromkeys(model for row in MEASURED.values() for model in row))
    terminalreporter.write_line("\n| measured against vLLM | " + " | ".join(models) + " |")
    terminalreporter.write_line("| --- |" + " --- |" * len(models))
    for name, row in MEASURED.items():
        terminalreporter.write_line(f"| {name} | " + " | ".join(row.get(model, "") for model in models) + " |")
