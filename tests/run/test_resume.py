"""A killed run, resumed, leaves the same bytes as one that was never stopped (times, memory and host aside)."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import tomli_w

from tests.e2e.tiny import tiny_config
from tests.processes import Topd
from topd.run.catalogue import VOLATILE

STEPS = {"run__steps": 6, "run__checkpoint_every": 2, "eval__every_steps": 2, "run__keep_checkpoints": 1}


def results(directory: Path) -> dict[str, object]:
    """Everything a run leaves that must not depend on interruptions."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{key: value for key, value in row.items() if key not in VOLATILE} for row in rows],
        "evals": (directory / "evals.jsonl").read_bytes(),
        "weights": (directory / "model" / "model.safetensors").read_bytes(),
        "vocabulary": (directory / "vocabulary.parquet").read_bytes(),
        **{name: {p.name: p.read_bytes() for p in sorted((directory / name).iterdir())} for name in ("rollouts", "updates")},
    }


def start(config: Path, *words: str) -> Topd:
    return Topd("train", str(config), *words)


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(tiny_config(folder / "run", **{**STEPS, **changes})))
    return path


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps; treat it as read-only."""
    import topd

    folder = tmp_path_factory.mktemp("two_steps") / "run"
    topd.train(tiny_config(folder, run__steps=2))
    return folder


@pytest.fixture
def finished(two_steps: Path, tmp_path: Path) -> Path:
    """A copy of it, which may be changed."""
    return shutil.copytree(two_steps, tmp_path / "run")


def wait_for(ready, process: Topd) -> None:
    """Poll until `ready()`; the process must not end before."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole")
    process = start(write_config(folder))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return results(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["rollouts/step_000001.parquet", "rollouts/step_000004.parquet", "checkpoints/step_000004", "model"]
)
def test_kill_at_any_moment_then_resume_leaves_the_same_bytes(
    moment: str, tmp_path: Path, uninterrupted: dict[str, object]
) -> None:
    """SIGKILL as soon as a file appears: before the first update on a batch, between updates, after a checkpoint, at the end."""
    config = write_config(tmp_path)
    process = start(config)
    wait_for((tmp_path / "run" / moment).exists, process)
    process.kill()
    process.communicate()
    process = start(config, "--run.resume", "true")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert results(tmp_path / "run") == uninterrupted


@pytest.mark.slow
def test_ctrl_c_between_two_updates_saves_says_how_to_go_on_and_resumes_exactly(
    tmp_path: Path, uninterrupted: dict[str, object]
) -> None:
    config = write_config(tmp_path)
    process = start(config)
    wait_for((tmp_path / "run/rollouts/step_000003.parquet").exists, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "--run.resume true" in output
    assert "Traceback" not in output
    process = start(config, "--run.resume", "true")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert results(tmp_path / "run") == uninterrupted


def test_resume_in_the_middle_of_a_step_continues_with_the_next_update(tmp_path: Path) -> None:
    """Stop after exactly one of four updates of step 2, through the API, and compare with a run that was not stopped."""
    from topd import config_file
    from topd.loop import run
    from topd.run.interrupt import Interrupted
    from topd.trainer.step import Trainer

    def config(name: str, **changes: object):
        tree = tiny_config(tmp_path / name, run__steps=3, trainer__minibatch_prompts=1, run__checkpoint_every=10, **changes)
        return config_file.load(tree)

    run(config("whole"))
    update, made = Trainer.update, 0

    def stopping_update(self, batch):
        nonlocal made
        if made == 5:
            raise Interrupted("SIGINT")
        made += 1
        return update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", stopping_update)
        with pytest.raises(Interrupted):
            run(config("stopped"))
    [saved] = (tmp_path / "stopped" / "checkpoints").iterdir()
    assert saved.name == "step_000001_update_000001"
    run(config("stopped", run__resume=True))
    assert results(tmp_path / "stopped") == results(tmp_path / "whole")


def test_a_finished_run_resumed_with_more_steps_equals_a_longer_run(tmp_path: Path, finished: Path) -> None:
    import topd

    topd.train(tiny_config(tmp_path / "long", run__steps=3))
    topd.train(tiny_config(finished, run__steps=3, run__resume=True))
    short, long = results(finished), results(tmp_path / "long")
    assert short["metrics"] == long["metrics"]
    assert short["weights"] == long["weights"]


def test_fewer_steps_than_already_made_are_refused(finished: Path) -> None:
    import topd
    from topd.errors import ConfigError

    with pytest.raises(ConfigError, match=r"run\.steps = 1, but the run"):
        topd.train(tiny_config(finished, run__steps=1, run__resume=True))


@pytest.mark.parametrize(
    "file",
    [
        "checkpoints/step_000002/policy.safetensors",
        "checkpoints/step_000002/optimizer.safetensors",
        "checkpoints/step_000002/state.json",
        "rollouts/step_000003.parquet",
        "metrics.jsonl",
        "evals.jsonl",
        "config.toml",
    ],
)
def test_damaged_files_are_named_with_a_remedy(finished: Path, file: str) -> None:
    import topd
    from topd.errors import ConfigError

    (finished / file).write_bytes(b"not what it was\n")
    with pytest.raises(ConfigError, match=r"damaged") as caught:
        topd.train(tiny_config(finished, run__steps=3, run__resume=True))
    assert file.split("/")[-1] in str(caught.value) or file.split("/")[-2] in str(caught.value)


def test_rollouts_of_other_prompts_are_not_taken(finished: Path) -> None:
    import topd
    from topd.errors import ConfigError

    rollouts = finished / "rollouts"
    (rollouts / "step_000003.parquet").write_bytes((rollouts / "step_000001.parquet").read_bytes())
    with pytest.raises(ConfigError, match="does not hold this step's prompts"):
        topd.train(tiny_config(finished, run__steps=3, run__resume=True))


def test_a_stopped_run_keeps_its_updates(tmp_path: Path) -> None:
    """A loss that is not finite: what was trained until then is saved, though it was not time for a checkpoint."""
    import topd
    from topd.errors import RunStopped
    from topd.trainer.step import Trainer

    update, made = Trainer.update, 0

    def failing_update(self, batch):
        nonlocal made
        made += 1
        if made == 4:
            raise RunStopped("the loss of update 4 is not finite")
        return update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", failing_update)
        with pytest.raises(RunStopped):
            topd.train(tiny_config(tmp_path / "run", run__steps=3, run__checkpoint_every=10))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001_update_000001"]
