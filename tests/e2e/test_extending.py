"""Parts of a user's own, as docs/extending.md shows them: trained with, checked by their contracts, named in the run folder."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

import topd
from tests.e2e.extending import modules, toml
from tests.e2e.tiny import tiny_config
from topd import testing
from topd.errors import ConfigError


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The folder with the package `mine` and the configuration, where the test works."""
    for path, source in modules().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source)
    (tmp_path / "mine.toml").write_text(toml())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_a_run_with_parts_of_ones_own_learns_from_them_and_names_them(mine):
    summary = topd.train("mine.toml")
    assert summary["steps"] == 2
    environment = json.loads(Path("runs/mine/environment.json").read_text())
    used = {"mine.adding", "mine.close", "mine.ensemble", "mine.few", "mine.squashed"}
    assert environment["plugins"].keys() == used
    for path, origin in environment["plugins"].items():
        source = (mine / f"{path.replace('.', '/')}.py").read_bytes()
        assert origin["sha256"] == hashlib.sha256(source).hexdigest()
    assert json.loads(Path("runs/mine/credit.json").read_text())["floor"] == -2.0


def test_they_keep_their_contracts(mine):
    testing.check("mine.toml")
    testing.check(
        "mine.toml", "--algorithm.type", "mine.crossentropy", "--teacher", '{ type = "local", name = "builtin:tiny-teacher" }'
    )


@pytest.mark.parametrize("algorithm", ["topd", "opd", "grpo", "sft"])
def test_topds_own_parts_keep_them_too(tmp_path, algorithm):
    changes = {"rollout__group_size": 1} if algorithm == "sft" else {}
    testing.check(tiny_config(tmp_path, algorithm={"type": algorithm}, **changes))


@pytest.mark.parametrize(
    ("file", "old", "new", "rule"),
    [
        ("few", "groups += super()", "groups = super()", "groups are not in the order of prompts"),
        ("few", "part, params, on_tokens=on_tokens,", "part, params,", "on_tokens must add up"),
        ("ensemble", "math.log(2)", "math.log(3)", "teacher probabilities"),
        ("ensemble", 'gives = frozenset({"teacher_logprobs"})', "gives = frozenset()", "does not give"),
        ("squashed", "returns=reward", "returns=reward / 0", "returns is not finite"),
        ("squashed", "return loss, is_clipped", "return loss, 1.0 * is_clipped", "clipped must be bool"),
        ("squashed", "forward.logprobs - batch", "forward.logprobs.detach() - batch", "no gradient"),
        ("close", "1.0 if off == 0", "0.9 if off == 0", "right answers"),
    ],
)
def test_a_part_that_breaks_its_contract_is_told_which(mine, file, old, new, rule):
    path = mine / f"mine/{file}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(AssertionError, match=rule):
        testing.check("mine.toml")


def test_wrong_values_of_its_keys_are_refused_as_of_any(mine):
    for words, said in (
        (("--rollout.options.prompts_at_once", "0"), "rollout.options.prompts_at_once"),
        (("--task.largest", "many"), "task.largest"),
        (("--algorithm.bnd", "1"), "unknown key 'algorithm.bnd'"),
    ):
        with pytest.raises(ConfigError, match=said):
            topd.train("mine.toml", *words)
