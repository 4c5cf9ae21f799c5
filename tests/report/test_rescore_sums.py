"""What a rescore says of several steps and of its groups, where the last step or one token would say something else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import credit_input
from tests.report.folders import TOPD, VECTOR, by_hand, write_run, write_step
from topd import algorithms
from topd.errors import ConfigError
from topd.report.rescoring.difference import edges_for
from topd.report.rescoring.recredit import credited
from topd.report.rescoring.rescore import rescore

AGREED = [{"ids": [9, 14], "student": [-1.0, -2.0], "teacher": [-1.0, -2.0]}, {"ids": [7], "student": [-0.5], "teacher": [-0.5]}]
"""A group without signal, whatever alpha is."""


def test_a_group_is_silent_only_if_none_of_its_tokens_is_weighed() -> None:
    config = algorithms.load("topd").Config(reward="log_ratio", returns="immediate", normalize="none")
    student, teacher = [[[-1.0, -1.0]], [[-1.0], [-2.0]]], [[[-1.0, -0.5]], [[-1.0], [-2.0]]]
    assert credited(credit_input(student, teacher), config).silent_groups == 1


def test_one_step_that_differs_is_a_difference(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": VECTOR})
    write_step(path, {"a": AGREED}, step=2)
    found = rescore(path, ["--algorithm.alpha", "0.1"])
    assert [row["silent_groups"]["new"] for row in found["steps"]] == [0, 1]
    assert not found["same"]
    assert rescore(path, ["--algorithm.alpha", "0.1"], steps=[2])["same"]


def test_the_largest_difference_to_what_is_stored_is_that_of_all_steps(tmp_path: Path) -> None:
    off = [{**completion, "advantage": [x + 5e-6 for x in completion["advantage"]]} for completion in VECTOR]
    path = write_run(tmp_path / "run", {"a": off})
    write_step(path, {"a": AGREED}, step=2)
    found = rescore(path, ["--algorithm.alpha", "0.1"])
    assert found["largest_difference"] == pytest.approx(5e-6, rel=0.2)


def test_the_map_has_the_old_advantages_in_its_rows(tmp_path: Path) -> None:
    found = rescore(write_run(tmp_path / "run", {"a": VECTOR}), ["--algorithm.normalize", "none"])
    old = np.concatenate(by_hand(0.2))
    assert found["joint"]["old_edges"] == pytest.approx(edges_for(old).tolist(), abs=1e-5)
    assert max(np.abs(found["joint"]["new_edges"])) < 0.2  # returns, not divided by their std


def test_the_smallest_group_decides_whether_there_is_company(tmp_path: Path) -> None:
    settings = {**TOPD, "normalize": "none"}
    whole, alone = ([{**completion, "advantage": value} for completion, value in pairs] for pairs in groups_of_returns())
    path = write_run(tmp_path / "run", {"a": whole, "b": alone}, algorithm=settings)
    with pytest.raises(ConfigError, match="has a group of 1"):
        rescore(path, ["--algorithm.normalize", "group_tokens"])


def groups_of_returns() -> tuple[list, list]:
    """The vector, and its first completion alone, with their returns as advantages."""
    topd = algorithms.load("topd")
    data = credit_input([[c["student"] for c in VECTOR]], [[c["teacher"] for c in VECTOR]])
    parts = topd.credit(data, topd.Config(normalize="none")).advantages.split([3, 2])
    values = [torch.Tensor.tolist(part) for part in parts]
    pairs = list(zip(VECTOR, values, strict=True))
    return pairs, pairs[:1]
