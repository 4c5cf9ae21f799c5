"""Every shipped configuration runs two shrunken steps, and every TOML block of the documentation parses."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import topd
from topd import config_file

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(config_file.SHIPPED.glob("*.toml"))
SHRINK = [
    *("--student.name", "builtin:tiny-student"),
    *("--rollout.prompts_per_step", "4"),
    *("--rollout.max_completion_tokens", "8"),
    *("--trainer.minibatch_prompts", "2"),
    *("--eval.samples_per_problem", "2"),
    *("--eval.max_problems", "2"),
    *("--eval.benchmarks", "[]"),
    *("--run.steps", "2"),
    *("--run.device", "cpu"),
]
SUMS = ["--task", '{type="jsonl",path="builtin:sums_train.jsonl",eval_path="builtin:sums_eval.jsonl",grader="exact"}']


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_run_two_shrunken_steps(path: Path, tmp_path: Path) -> None:
    """Real models and data are replaced by the shipped tiny ones; every other setting stays."""
    words = [*SHRINK, *SUMS, "--run.directory", str(tmp_path / "run")]
    if "teacher" in tomllib.loads(path.read_text()):
        words += ["--teacher.name", "builtin:tiny-teacher"]
    summary = topd.train(str(path), *words)
    assert summary["steps"] == 2
    assert summary["student"]["k"] == 2
    assert (tmp_path / "run/model/model.safetensors").is_file()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_tasks_of_shipped_configurations_load(path: Path) -> None:
    from topd.tasks.jsonl import Config as JsonlConfig
    from topd.tasks.task import make_task

    task = config_file.load(path).task
    if isinstance(task, JsonlConfig) and not task.path.startswith("builtin:"):
        pytest.skip("its data are made by a script in runs/")
    assert make_task(task, seed=0).held_out


def test_one_configuration_per_algorithm_differs_in_the_algorithm_alone() -> None:
    trees = {name: tomllib.loads((config_file.SHIPPED / f"{name}.toml").read_text()) for name in ("quickstart", "opd", "grpo")}
    expected = {key: value for key, value in trees["quickstart"].items() if key != "algorithm"}
    for name, tree in trees.items():
        assert {key: value for key, value in tree.items() if key != "algorithm"} == {
            **expected,
            "run": {**expected["run"], "directory": tree["run"]["directory"]},
        }, name


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.stem)
def test_toml_and_json_blocks_of_the_documentation_parse(page: Path) -> None:
    for language, block in re.findall(r"```(toml|jsonl?)\n(.*?)```", page.read_text(), re.DOTALL):
        for text in block.splitlines() if language == "jsonl" else [block]:
            tomllib.loads(text) if language == "toml" else json.loads(text)
    assert page.is_file()


@pytest.mark.slow
def test_a_wheel_holds_all_that_a_run_needs(tmp_path: Path) -> None:
    """Configurations, the shipped pair and its data, and the typing marker are package data."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = [f"topd/configs/{path.name}" for path in SHIPPED]
    wanted += [f"topd/builtin/{name}/model.safetensors" for name in ("tiny-student", "tiny-teacher")]
    wanted += ["topd/builtin/sums_train.jsonl", "topd/builtin/sums_eval.jsonl", "topd/py.typed"]
    assert set(wanted) <= held
    weights = sum(entry.file_size for entry in zipfile.ZipFile(wheel).infolist() if entry.filename.endswith(".safetensors"))
    assert weights <= 4_000_000
