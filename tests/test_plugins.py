"""A part is found by its name, or by the import path of a user's module; everything else is an error with the remedy."""

import hashlib
from pathlib import Path

import pytest

from topd.errors import ConfigError
from topd.plugins import ALGORITHM, Kind, provenance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that can be imported, under a name of its own for each test."""
    folder = tmp_path / f"package_of_{tmp_path.name}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_own_modules_are_found_without_importing_them(package: Path) -> None:
    for name, source in {
        "good": "class Config: ...\ndef make(section): ...\n",
        "assigned": "Config = object\nmake = print\n",
        "base": "def make(section): ...\n",
        "helper": '    class Config: ...\n"""def make"""\n',
        "broken": "class Config: ...\ndef make(section): ...\nraise RuntimeError\n",
    }.items():
        (package / f"{name}.py").write_text(source)
    kind = Kind(package.name, "thing.type")
    assert kind.available == ["assigned", "broken", "good"]
    assert kind.load("good").__name__ == f"{package.name}.good"


def test_a_name_that_is_none_is_an_error_with_the_nearest_and_the_way_to_an_own_module() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.type must be one of 'grpo'.*my_package.my_module.*Did you mean 'topd'\?"):
        ALGORITHM.load("top_d")


def test_an_import_path_leads_to_a_users_module(package: Path) -> None:
    (package / "mine.py").write_text("class Config: ...\ndef make(section): return 7\n")
    assert Kind("topd.tasks", "task.type").load(f"{package.name}.mine").make(None) == 7


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')"),
        ("raise ValueError('so\\nmany lines')", "cannot be imported (ValueError: so)"),
        ("def f(:", "cannot be imported (SyntaxError"),
        ("class Config: ...", "the module lacks make. It must define Config, make"),
    ],
)
def test_a_users_module_that_cannot_be_used_is_named_with_the_reason(package: Path, source: str, said: str) -> None:
    (package / "mine.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        Kind("topd.tasks", "task.type").load(f"{package.name}.mine")
    assert str(caught.value).startswith(f'task.type = "{package.name}.mine"')
    assert said in str(caught.value)


def test_a_module_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r'"no_such_package.x" cannot be imported .*set PYTHONPATH'):
        ALGORITHM.load("no_such_package.x")


def test_where_a_module_comes_from(package: Path) -> None:
    (package / "mine.py").write_text("x = 1\n")
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    assert provenance(f"{package.name}.mine") == {"distribution": None, "version": None, "sha256": digest}
    of_pydantic = provenance("pydantic.main")
    assert of_pydantic["distribution"] == "pydantic"
    assert of_pydantic["version"]
