"""Only complete checkpoints are read; a full disk never costs an older one."""

from pathlib import Path

import pytest
import tomli_w
import torch

from tests.e2e.tiny import tiny_config
from tests.processes import Topd
from tests.trainer.test_step import batch
from topd import config_file
from topd.assemble import assemble, make_trainer
from topd.run import checkpoint
from topd.types import UpdateReport


@pytest.fixture
def trainer(tmp_path: Path):
    return make_trainer(assemble(config_file.load(tiny_config(tmp_path / "run"))))


def report(loss: float) -> UpdateReport:
    streams = {"log_importance": torch.tensor([loss, -loss]), "clipped": torch.tensor([False, True])}
    return UpdateReport(loss=loss, grad_norm=1.0, learning_rate=1e-3, **streams)


def test_names_sort_as_time_goes() -> None:
    times = [(0, 0), (0, 1), (9, 0), (9, 3), (9, 12), (10, 0)]
    assert [checkpoint.name_of(*time) for time in times] == sorted(checkpoint.name_of(*time) for time in times)


def test_what_is_saved_is_restored(tmp_path: Path, trainer) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(trainer.policy.trainable().values()):
            parameter.add_(number)
    trainer.policy.version, trainer.reports = 7, (report(0.5),)
    saved = checkpoint.save(tmp_path / "c", trainer, steps_done=3, keep=2)
    before = {name: parameter.detach().clone() for name, parameter in trainer.policy.trainable().items()}
    with torch.no_grad():
        for parameter in trainer.policy.trainable().values():
            parameter.zero_()
    trainer.policy.version, trainer.reports = 0, ()
    assert checkpoint.restore(saved, trainer) == 3
    assert trainer.policy.version == 7
    [restored] = trainer.reports
    assert restored.loss == 0.5
    assert torch.equal(restored.log_importance, torch.tensor([0.5, -0.5]))
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.policy.trainable().items())


def test_a_folder_without_marker_is_never_picked_up(tmp_path: Path, trainer) -> None:
    good = checkpoint.save(tmp_path, trainer, steps_done=1, keep=5)
    broken = checkpoint.save(tmp_path, trainer, steps_done=2, keep=5)
    (broken / checkpoint.MARKER).unlink()
    unfinished = checkpoint.save(tmp_path, trainer, steps_done=3, keep=5)
    unfinished.rename(unfinished.with_name(unfinished.name + ".partial"))
    assert checkpoint.newest(tmp_path) == good
    assert checkpoint.passed_over(tmp_path) == [broken]
    assert checkpoint.passed_over(tmp_path / "nothing") == []


def test_only_the_newest_are_kept(tmp_path: Path, trainer) -> None:
    for step in range(1, 5):
        checkpoint.save(tmp_path, trainer, steps_done=step, keep=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_000003", "step_000004"]


@pytest.mark.slow
def test_a_full_disk_stops_the_run_resumably_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    """The limit on file sizes stands in for the disk: weights and optimizer state no longer fit, small files do."""
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(tiny_config(tmp_path / "run", run__steps=1, eval__max_problems=1)))

    def run(*words: str, limit: int | None = None) -> tuple[int | None, str]:
        process = Topd("train", str(config), *words, limit=limit)
        output, _ = process.communicate()
        return process.returncode, output

    assert run()[0] == 0
    more = ("--run.resume", "true", "--run.steps", "2")
    code, output = run(*more, limit=100_000)
    assert code == 3, output
    assert "could not be written" in output
    assert "Traceback" not in output
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]
    assert run(*more)[0] == 0


def test_the_optimizer_goes_on_where_it_was(tmp_path: Path, trainer) -> None:
    trainer.update(batch())
    saved = checkpoint.save(tmp_path / "c", trainer, steps_done=0, keep=2)
    fresh = make_trainer(assemble(config_file.load(tiny_config(tmp_path / "run"))))
    checkpoint.restore(saved, fresh)
    trainer.update(batch())
    fresh.update(batch())
    for (name, one), other in zip(trainer.policy.trainable().items(), fresh.policy.trainable().values(), strict=True):
        assert torch.equal(one, other), name
        mine, theirs = trainer.policy.optimizer.state[one], fresh.policy.optimizer.state[other]
        assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_checkpoint_that_is_half_removed_is_never_picked_up(tmp_path: Path, trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed while it removes an old one."""
    checkpoint.save(tmp_path, trainer, steps_done=1, keep=1)

    def killed(path: Path) -> None:
        (path / "policy.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, trainer, steps_done=2, keep=1)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_000002"]
