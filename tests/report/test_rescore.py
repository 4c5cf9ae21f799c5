"""`topd rescore`: the numbers of another credit, worked out by hand or by plain numpy, and a folder left as it was."""

import hashlib
import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch

import topd
from tests.e2e.tiny import tiny_config
from tests.report.folders import TOPD, VECTOR, by_hand, floor, write_run, write_step
from topd.cli import main
from topd.errors import ConfigError
from topd.report.rescoring.difference import binned, edges_for, ranks
from topd.report.rescoring.rescore import rescore
from topd.report.stored import read_run

PUBLISHED = {0.2: [0.4772, -1.4909, 0.9075, 0.6532, -0.5469], 0.1: [0.4939, -1.4815, 0.8833, 0.6749, -0.5705]}
"""Advantages of the test vector, by alpha."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rescore") / "run"
    topd.train(tiny_config(path, eval__max_problems=1, rollout__group_size=4))
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def vector(tmp_path: Path) -> Path:
    return write_run(tmp_path / "vector", {"train/7": VECTOR}, words={9: b"7", 14: b"=", 1: b";", 7: b"8"})


def rows_of(path: Path, step: int = 1) -> list[dict[str, Any]]:
    return pq.read_table(path / f"rollouts/step_{step:06d}.parquet").to_pylist()


def column(path: Path, name: str, steps: tuple[int, ...] = (1, 2)) -> np.ndarray:
    return np.concatenate([np.float64(row[name]) for step in steps for row in rows_of(path, step)])


def words(**settings: Any) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--algorithm.{key}", str(value))]


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_the_published_vector_with_another_alpha(vector: Path) -> None:
    found = rescore(vector, words(alpha=0.1))
    old, new = ([number for part in by_hand(alpha) for number in part] for alpha in (0.2, 0.1))
    assert old == pytest.approx(PUBLISHED[0.2], abs=1e-4)
    assert new == pytest.approx(PUBLISHED[0.1], abs=1e-4)
    expected = {(i, j): value for i, part in enumerate(by_hand(0.1)) for j, value in enumerate(part)}
    assert {(token["rollout"], token["position"]) for token in found["top_changes"]} == expected.keys()
    for token in found["top_changes"]:
        completion = VECTOR[token["rollout"]]
        assert token["new"] == pytest.approx(expected[token["rollout"], token["position"]], abs=1e-5)
        assert token["old"] == pytest.approx(completion["advantage"][token["position"]], abs=1e-5)
        assert token["token_id"] == completion["ids"][token["position"]]
    changes = [abs(token["new"] - token["old"]) for token in found["top_changes"]]
    assert changes == sorted(changes, reverse=True)
    overall = found["overall"]
    assert found["changed"] == {"alpha": {"old": 0.2, "new": 0.1}}
    assert overall["mean_abs_advantage"]["old"] == pytest.approx(np.abs(old).mean(), abs=1e-5)
    assert overall["mean_abs_advantage"]["new"] == pytest.approx(np.abs(new).mean(), abs=1e-5)
    assert overall["top_share"]["new"] == pytest.approx(max(np.abs(new)) / np.abs(new).sum(), abs=1e-5)
    assert overall["pearson"] == pytest.approx(pearson(np.array(old), np.array(new)), abs=1e-5)
    assert overall["cosine"] == pytest.approx(np.dot(old, new) / np.linalg.norm(old) / np.linalg.norm(new), abs=1e-5)
    assert (overall["spearman"], overall["sign_changes"]) == (1, 0)
    assert (overall["tokens"], overall["compared"], overall["groups"], overall["step"]) == (5, 5, 1, None)
    reward = np.log(0.1 * np.exp([0.2, -1, 0, 0.3, -0.5]) + 0.9)
    assert overall["reward_mean"]["new"] == pytest.approx(reward.mean(), abs=1e-6)
    assert overall["reward_std"]["new"] == pytest.approx(reward.std(), abs=1e-6)


def test_a_rejected_token_is_at_the_floor_and_counted(tmp_path: Path) -> None:
    """A fifth of the tokens has a ratio of 0 or a twentieth; clipping at 2 nats counts only those as well."""
    lowest = {"ids": [1] * 5, "student": [-1.0] * 5, "teacher": [-np.inf, -1.0 - math.log(20), -2.0, -1.0, -0.5]}
    settings = {"type": "topd", "normalize": "none", "returns": "immediate"}
    reward = [floor(0.2), math.log(0.2 / 20 + 0.8), math.log(0.2 / math.e + 0.8), 0.0, math.log(0.2 * math.exp(0.5) + 0.8)]
    lowest["advantage"] = reward
    path = write_run(tmp_path / "run", {"a": [lowest]}, algorithm=settings)
    found = rescore(path, words(alpha=0.1))
    assert found["overall"]["floor_share"] == {"old": 0.4, "new": 0.4}
    assert rescore(path, words(reward="clipped", reward_bound="2.0"))["overall"]["floor_share"] == {"old": 0.4, "new": 0.4}
    assert rescore(path, words(reward="clipped", reward_bound="9.0"))["overall"]["floor_share"] == {"old": 0.4, "new": 0.2}
    unbounded = rescore(path, words(reward="log_ratio"))
    assert unbounded["overall"]["floor_share"] == {"old": 0.25, "new": None}
    assert (unbounded["overall"]["compared"], unbounded["overall"]["tokens"]) == (4, 5)
    assert unbounded["overall"]["reward_mean"]["new"] == pytest.approx((-math.log(20) - 1 + 0.5) / 4, abs=1e-6)


@pytest.mark.parametrize("own", [words(alpha=0.2), words(type="topd"), words(clip=0.1)], ids=str)
def test_the_runs_own_credit_differs_in_nothing(run: Path, own: list[str]) -> None:
    found = rescore(run, own)
    assert found["same"]
    assert found["largest_difference"] == 0
    for row in (*found["steps"], found["overall"]):
        assert row["pearson"] == pytest.approx(1, abs=1e-9)
        assert row["spearman"] == pytest.approx(1, abs=1e-9)
        assert row["cosine"] == pytest.approx(1, abs=1e-9)
        assert row["sign_changes"] == 0
        assert all(pair["old"] == pair["new"] for pair in row.values() if isinstance(pair, dict))
    assert found["top_changes"] == []
    counts = np.array(found["joint"]["counts"])
    assert np.array_equal(counts, np.diag(np.diag(counts)))


def test_opd_over_the_rollouts_of_topd(run: Path) -> None:
    """The other algorithm's advantage is the log-ratio, its weights are the same for every token."""
    found = rescore(run, words(type="opd"))
    new = np.float32(column(run, "teacher_logprobs")) - np.float32(column(run, "behaviour_logprobs"))
    new, old = np.float64(new), column(run, "advantages")
    overall = found["overall"]
    assert overall["tokens"] == overall["compared"] == found["num_tokens"] == len(new)
    assert overall["pearson"] == pytest.approx(pearson(old, new), abs=1e-6)
    assert overall["sign_changes"] == pytest.approx(np.mean(np.sign(old) * np.sign(new) < 0), abs=1e-9)
    assert overall["mean_abs_advantage"]["new"] == pytest.approx(np.abs(new).mean(), abs=1e-6)
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert found["new"] == {"type": "opd", "clip": 0.2}
    assert found["changed"] == {"type": {"old": "topd", "new": "opd"}}
    worst = found["top_changes"][0]
    assert abs(worst["new"] - worst["old"]) == pytest.approx(np.abs(new - old).max(), abs=1e-5)
    row = [row for row in rows_of(run, worst["step"]) if row["prompt_id"] == worst["prompt_id"]][worst["rollout"]]
    assert row["completion_ids"][worst["position"]] == worst["token_id"]
    assert row["advantages"][worst["position"]] == pytest.approx(worst["old"], abs=1e-5)
    one = found["steps"][0]
    lengths = [[len(row["completion_ids"]) for row in rows_of(run)[i : i + 4]] for i in range(0, 16, 4)]
    of_group = np.repeat([1 / sum(group) for group in lengths], [sum(group) for group in lengths])
    a, b = column(run, "advantages", (1,)) * of_group, new[: len(of_group)]
    assert one["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-5)
    assert one["spearman"] == pytest.approx(pearson(slow_ranks(column(run, "advantages", (1,))), slow_ranks(b)), abs=1e-4)


def slow_ranks(values: np.ndarray) -> np.ndarray:
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


def test_grpo_over_graded_rollouts(tmp_path: Path) -> None:
    """Grades 1, 0 and 1, 1: advantages of one number per completion, and a group without signal."""
    graded = [{**VECTOR[0], "grade": 1.0}, {**VECTOR[1], "grade": 0.0}]
    path = write_run(tmp_path / "run", {"a": graded, "b": [{**part, "grade": 1.0} for part in VECTOR]})
    found = rescore(path, words(type="grpo"))
    assert found["overall"]["silent_groups"] == {"old": 0, "new": 1}
    assert found["overall"]["reward_mean"]["new"] == pytest.approx(8 / 10)
    assert found["overall"]["mean_abs_advantage"]["new"] == pytest.approx(math.sqrt(0.5) / 2, abs=1e-6)
    assert found["overall"]["floor_share"]["new"] is None


def test_topd_over_the_rollouts_of_opd_begins_with_its_defaults(tmp_path: Path) -> None:
    ratios = [{**part, "advantage": np.subtract(part["teacher"], part["student"]).tolist()} for part in VECTOR]
    path = write_run(tmp_path / "run", {"a": ratios}, algorithm={"type": "opd", "clip": 0.3})
    found = rescore(path, words(type="topd", returns="immediate"))
    assert found["new"] == {**topd_defaults(), "returns": "immediate"}
    assert found["name"] == "type=topd,returns=immediate"
    assert found["old"] == {"type": "opd", "clip": 0.3}


def topd_defaults() -> dict[str, Any]:
    from topd.algorithms.topd import Config

    return Config().model_dump()


def test_histograms_count_every_token(run: Path) -> None:
    found = rescore(run, words(type="opd"))
    histogram, joint = found["histogram"], found["joint"]
    assert sum(histogram["old"]) == sum(histogram["new"]) == found["num_tokens"]
    assert len(histogram["edges"]) == len(histogram["old"]) + 1
    counts = np.array(joint["counts"])
    assert counts.sum() == found["num_tokens"]
    assert counts.shape == (len(joint["old_edges"]) - 1, len(joint["new_edges"]) - 1)
    inner = np.array(joint["old_edges"])[1:-1]
    assert (
        counts.sum(axis=1).tolist()
        == np.bincount(np.digitize(column(run, "advantages"), inner), minlength=len(inner) + 1).tolist()
    )


def test_bins_are_open_at_the_ends_and_never_empty_of_width() -> None:
    edges = edges_for(np.zeros(3), np.zeros(3))
    assert np.all(np.diff(edges) > 0)
    assert binned(np.array([-1e9, 0.0, 1e9]), edges).tolist() == [0, 20, 39]
    assert len(edges_for(np.zeros(0))) == 41


def test_ranks_share_ties() -> None:
    values = np.array([3.0, 1.0, 3.0, 2.0, 3.0, 1.0])
    assert ranks(values).tolist() == slow_ranks(values).tolist() == [5.0, 1.5, 5.0, 3.0, 5.0, 1.5]


def digests(path: Path) -> dict[str, str]:
    files = [file for file in path.rglob("*") if file.is_file() and "rescores" not in file.parts]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_folder_is_left_alone_and_the_run_still_resumes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(run)
    found = topd.rescore(run, "--algorithm.alpha", "0.1", "--algorithm.returns=immediate")
    assert digests(run) == before
    file = run / "rescores/alpha=0.1,returns=immediate.json"
    assert [each.name for each in (run / "rescores").iterdir()] == [file.name]
    assert json.loads(file.read_text()) == found == dict(read_run(run).rescores[0])
    config = tiny_config(run, eval__max_problems=1, rollout__group_size=4, run__steps=3, run__resume=True)
    topd.train(config)
    assert file.is_file()
    assert read_run(run).steps == (1, 2, 3)
    assert len(rescore(run, words(alpha=0.1))["steps"]) == 3


def test_a_run_in_training_is_read_as_far_as_it_is(run: Path) -> None:
    for name in ("summary.json", "rollouts/step_000002.parquet"):
        (run / name).unlink()
    (run / "rollouts/step_000002.parquet.partial").write_bytes(b"half")
    shutil.rmtree(run / "updates")
    assert [row["step"] for row in rescore(run, words(alpha=0.1))["steps"]] == [1]


def test_damaged_steps_are_said_to_be_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollouts/step_000001.parquet").write_bytes(b"no parquet")
    assert main(["rescore", str(run), *words(alpha=0.1)]) == 0
    out = capsys.readouterr().out
    assert "steps [1]" in out
    assert "note: rollouts of step 1 could not be read" in out
    assert json.loads((run / "rescores/alpha=0.1.json").read_text())["skipped_steps"] == [1]
    with pytest.raises(ConfigError, match=r"--steps: step 1 cannot be used: rollouts of step 1 could not be read"):
        rescore(run, words(alpha=0.1), steps=[1, 2])
    (run / "rollouts/step_000002.parquet").unlink()
    with pytest.raises(ConfigError, match=r"no rollouts of .* can be read"):
        rescore(run, words(alpha=0.1))


def test_changed_numbers_end_the_comparison(vector: Path) -> None:
    first, second, third = VECTOR[0]["advantage"]
    edited = [{**VECTOR[0], "advantage": [first, second + 1.34e-4, third]}, VECTOR[1]]
    write_step(vector, {"train/7": edited})
    with pytest.raises(
        ConfigError, match=r"step 1: under the run's own settings .* 1 of 5 advantages differ, by up to 0\.000134"
    ):
        rescore(vector, words(alpha=0.1))
    assert not (vector / "rescores").exists()
    (vector / "config.toml").write_text(tomli_w.dumps({"algorithm": {**TOPD, "alpha": 0.3}}))
    write_step(vector, {"train/7": VECTOR})
    with pytest.raises(ConfigError, match="5 of 5 advantages differ"):
        rescore(vector, words(alpha=0.1))


def test_a_folder_without_stored_advantages_cannot_be_checked(vector: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = vector / "rollouts/step_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["advantages", "returns", "token_rewards"]), file)
    assert main(["rescore", str(vector), *words(alpha=0.1)]) == 0
    assert "checked     nothing: the rollouts hold no advantages" in capsys.readouterr().out
    assert read_run(vector).rescores[0]["largest_difference"] is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "there is nothing to recompute"),
        (["--run.steps", "3"], r"--run\.steps cannot be changed here: .*only the credit can be recomputed"),
        (["--trainer.learning_rate=1e-4"], r"--trainer\.learning_rate cannot be changed here"),
        (["--algorithm.alpha", "1.5"], r"algorithm\.alpha"),
        (["--algorithm.alpha"], "has no value"),
        (["--algorithm.alhpa", "0.1"], r"unknown key 'algorithm\.alhpa'"),
        (["--algorithm.type", "tpod"], "Did you mean 'topd'"),
        (["--algorithm.type", "opd", "--algorithm.alpha", "0.1"], r"unknown key 'algorithm\.alpha'"),
        (["--algorithm.type", "sft"], '"sft" needs demonstrations'),
        (["--algorithm.reward", "log_ratio", "--algorithm.alpha", "0.1"], r"would be ignored .*The other keys are the run's own"),
        (["alpha=0.1"], "cannot read 'alpha=0.1'"),
    ],
)
def test_what_cannot_be_recomputed_is_named(run: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rescore(run, overrides)
    assert not (run / "rescores").exists()


def test_what_was_not_stored_is_named(tmp_path: Path) -> None:
    alone = [{"ids": [1, 2], "student": [-1.0, -1.0], "advantage": [0.0, 0.0]} for _ in range(2)]
    path = write_run(tmp_path / "grpo", {"a": alone}, algorithm={"type": "grpo"})
    with pytest.raises(ConfigError, match='"topd" needs teacher log-probs, which the rollouts of step 1 do not hold'):
        rescore(path, words(type="topd"))
    path = write_run(tmp_path / "ungraded", {"a": VECTOR}, answer=None)
    with pytest.raises(ConfigError, match='"grpo" needs graded answers'):
        rescore(path, words(type="grpo"))
    ratio = {**VECTOR[0], "advantage": np.subtract(VECTOR[0]["teacher"], VECTOR[0]["student"]).tolist()}
    path = write_run(tmp_path / "single", {"a": [ratio]}, algorithm={"type": "opd"})
    with pytest.raises(ConfigError, match="needs at least 2; step 1 has a group of 1"):
        rescore(path, words(type="topd"))


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a b", "x" * 101, "\x1b[2J", "caf\u00e9"])
def test_names_that_are_no_file_names_are_refused(vector: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name must be"):
        rescore(vector, words(alpha=0.1), name=name)
    assert not (vector / "rescores").exists()


@pytest.mark.parametrize("bad", ["", "x", "1,,2", "0", "-1", "1.5", "1 2", "9" * 10])
def test_steps_that_are_none_are_refused_with_an_example(bad: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["report"], ["rescore", "--algorithm.alpha", "0.1"]):
        with pytest.raises(SystemExit) as left:
            main([verb[0], str(run), f"--steps={bad}", *verb[1:]])
        assert left.value.code == 2
        assert f"such as 1,8,16; found '{bad}'" in capsys.readouterr().err


def test_steps_that_are_not_there_are_named(run: Path) -> None:
    found = rescore(run, words(alpha=0.1), steps=[2], name="second")
    assert ([row["step"] for row in found["steps"]], found["name"]) == ([2], "second")
    assert (run / "rescores/second.json").is_file()
    with pytest.raises(ConfigError, match=r"there are no rollouts of step 3, 9; there are steps 1 to 2"):
        rescore(run, words(alpha=0.1), steps=[1, 3, 9])


def test_a_rescore_of_some_steps_leaves_that_of_all_alone(run: Path) -> None:
    rescore(run, words(alpha=0.3))
    rescore(run, words(alpha=0.3), steps=[1])
    assert sorted(file.name for file in (run / "rescores").iterdir()) == ["alpha=0.3,steps=1.json", "alpha=0.3.json"]


def test_a_folder_that_cannot_be_written_is_named(vector: Path) -> None:
    (vector / "rescores").write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"rescores/alpha=0\.1\.json could not be written"):
        rescore(vector, words(alpha=0.1))


def test_the_verb_shows_every_number_with_its_tokens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(run), *words(alpha=0.1), "--steps", "1,2"]) == 0
    out = capsys.readouterr().out
    found = json.loads((run / "rescores/alpha=0.1,steps=1+2.json").read_text())
    assert "\x1b" not in out
    assert "alpha 0.2 -> 0.1" in out
    assert "stored advantages" in out
    rows = [line for line in out.split("all steps")[1].split("\n\n")[0].splitlines() if "over" not in line and line.strip()]
    assert len(rows) == 10
    assert all(line.endswith((f" {found['num_tokens']:,} tokens", " 8 groups")) for line in rows)
    assert f"{found['overall']['pearson']:+.4f}" in out
    assert f"{found['overall']['sign_changes']:.1%}" in out
    assert out.count("<eos>") + out.count(";") > 0 or found["top_changes"]
    assert max(map(len, out.splitlines())) <= 140


def test_commands_of_the_page_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/looking.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in "\n".join(blocks).splitlines()]
    own = [
        [word.replace("runs/quickstart", str(run)) for word in line] for line in lines if line[1:2] in (["explain"], ["rescore"])
    ]
    assert len(own) >= 6
    assert [main(line[1:]) for line in own] == [0] * len(own)
    assert capsys.readouterr().err == ""
    assert {rescored["name"] for rescored in read_run(run).rescores} == {
        "alpha=0.1",
        "returns=immediate,steps=1+2",
        "plain-log-ratio",
    }


def test_nothing_of_the_streams_is_changed(vector: Path) -> None:
    """`credit` is pure, so both settings see the same tokens."""
    from topd.report.rescoring.recredit import evidence

    step = read_run(vector).step(1)
    assert step is not None
    flat = evidence(step)
    assert flat.lengths.tolist() == [3, 2]
    assert flat.group_sizes.tolist() == [2]
    assert torch.equal(flat["behaviour_logprobs"], torch.tensor([-0.5, -1.0, -0.2, -0.4, -0.1]))
    assert torch.equal(flat["teacher_logprobs"], torch.tensor([-0.3, -2.0, -0.2, -0.1, -0.6]))
