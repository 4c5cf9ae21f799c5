"""A new algorithm with a reward of its own: the report knows its floor and its units from the run folder alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import topd
from tests.e2e.tiny import tiny_config
from tests.report.test_explain import shown
from topd.errors import ConfigError
from topd.report.charts import charts
from topd.report.health.checks import verdicts
from topd.report.lens import hold
from topd.report.stored import read_run

SOURCE = '''
"""Percent of the teacher's probability of a token."""

from typing import Literal

import torch

from topd.config import AlgorithmConfig
from topd.ops.weighting import token_mean
from topd.types import Credit

NEEDS = frozenset({"teacher_logprobs"})
WEIGHTING = token_mean


class Config(AlgorithmConfig):
    type: Literal["own_rewards.percent"] = "own_rewards.percent"
    offset: float = 7.0
    shifted: bool = True

    def floor(self):
        return (-self.offset, f"-offset = {-self.offset:g}") if self.shifted else None

    def units(self):
        return {"token_reward": "percent", "return": "percent of all", "advantage": "percentage points"}

    def unread(self):
        return {} if self.shifted else {"offset": "algorithm.shifted = false"}


def credit(evidence, config):
    rewards = 100 * evidence["teacher_logprobs"].exp() - (config.offset if config.shifted else 0.0)
    return Credit(advantages=rewards, token_rewards=rewards, returns=rewards)


def objective(forward, batch, config):
    loss = -forward.logprobs * batch["advantages"]
    return loss, torch.zeros_like(loss, dtype=torch.bool)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The name of the module in a package that is no part of topd."""
    (tmp_path / "own_rewards").mkdir()
    (tmp_path / "own_rewards/__init__.py").touch()
    (tmp_path / "own_rewards/percent.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_rewards.percent"
    for name in ("own_rewards.percent", "own_rewards"):
        sys.modules.pop(name, None)


def test_its_floor_and_units_reach_every_view(own: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    topd.train(tiny_config(folder, algorithm={"type": own}))
    run = read_run(folder)
    [held] = hold([run])
    assert (held.data["floor"], held.data["floor_words"]) == (-7.0, "-offset = -7")
    units = {stream["key"]: stream["unit"] for stream in held.data["streams"]}
    assert units == {"log_ratio": "nats", "token_reward": "percent", "return": "percent of all", "advantage": "percentage points"}
    assert held.data["scale"]["token_reward"] >= 7.0
    text = shown(folder, color="advantage")
    assert "no token reward is below -7.000 = -offset = -7" in text
    assert "advantage in percentage points" in text
    note = next(chart["note"] for chart in charts([run]) if chart["id"] == "token-reward")
    assert note == "It is never below -7, -offset = -7."
    assert "never falls below -7, -offset = -7" in " ".join(verdict.words for verdict in verdicts(run))


def test_the_report_reads_it_without_the_module_and_without_torch(own: str, tmp_path: Path) -> None:
    topd.train(tiny_config(tmp_path / "run", algorithm={"type": own}))
    code = "import sys; from topd.cli import main; main(sys.argv[1:]); print({'torch', 'own_rewards'} & set(sys.modules))"
    for command in ("report", "explain"):
        words = [sys.executable, "-c", code, command, str(tmp_path / "run")]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/")
        assert done.stdout.strip().splitlines()[-1] == "set()", done.stderr
    assert "-offset = -7" in done.stdout


def test_an_ignored_key_is_refused_and_not_shown(own: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.offset = 3\.0 would be ignored with algorithm\.shifted = false\. Remove it"
    ):
        topd.train(tiny_config(tmp_path / "bad", algorithm={"type": own, "shifted": False, "offset": 3.0}))
    topd.train(tiny_config(tmp_path / "run", algorithm={"type": own, "shifted": False}))
    text = shown(tmp_path / "run")
    assert "shifted False" in text
    assert "offset" not in text
