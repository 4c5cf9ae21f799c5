"""A trainer killed with requests in flight, resumed, leaves the same bytes, and does not ask again what it was told."""

import threading
from pathlib import Path

import pytest
import tomli_w

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import metrics, sampling_config, served_config, stored, train
from tests.run.test_resume import results, start, wait_for
from tests.serve.serving import serving
from topd.run.interrupt import Interrupted
from topd.teacher.probe_grades import GRADED_PROMPTS
from topd.trainer.step import Trainer
from topd.types import TrainBatch, UpdateReport


def stall_from(number: int, reached: threading.Event) -> faults.Schedule:
    async def fault(exchange: faults.Exchange) -> None:
        reached.set()
        await faults.stall(exchange)

    return lambda now: fault if now >= number else None


PROBED = 8 + 5 + 4 + 3
"""Requests that prove a teacher's numbers at every start: canaries, prefixes, places, weights."""


def kill_when(reached: threading.Event, config: Path) -> None:
    process = start(config)
    wait_for(reached.is_set, process)
    process.kill()
    process.communicate()


def finish(config: Path) -> None:
    process = start(config, "--run.resume", "true")
    output, _ = process.communicate()
    assert process.returncode == 0, output


def test_a_step_with_a_dropped_group_is_resumed_between_two_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rollouts on disk are those of the groups that were left, in the order of the prompts."""
    settings = {"teacher__max_dropped_share": 0.3, "trainer__minibatch_prompts": 1}
    update, made = Trainer.update, []

    def stopping_update(trainer: Trainer, batch: TrainBatch) -> UpdateReport:
        if len(made) == 1:
            raise Interrupted("SIGINT")
        made.append(0)
        return update(trainer, batch)

    with serving() as base, proxying(base) as proxy:
        train(served_config(tmp_path / "first", base, run__steps=1))
        refused = stored(tmp_path / "first", 1, "prompt_ids")[2]

        async def refusing(exchange: faults.Exchange) -> faults.Reply:
            asked = exchange.request.json["groups"][0]["prompt"]
            return faults.Reply(413, b"{}") if asked == refused else await exchange.forward()

        def begin(step: int) -> None:
            proxy.give(faults.always(refusing))

        train(served_config(tmp_path / "whole", proxy.url, **settings), begin)
        proxy.give(None)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "update", stopping_update)
            with pytest.raises(Interrupted):
                train(served_config(tmp_path / "run", proxy.url, **settings), begin)
        assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000000_update_000001"]
        proxy.give(None)
        train(served_config(tmp_path / "run", proxy.url, **settings, run__resume=True), begin)
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    assert [row["teacher/dropped_groups"] for row in metrics(tmp_path / "run")] == [1, 0]
    assert [row["train/updates"] for row in metrics(tmp_path / "run")] == [3, 4]


@pytest.mark.slow
def test_a_trainer_killed_while_the_teacher_is_asked(tmp_path: Path) -> None:
    """But PROBED: 0 to 2 prove the pair, 3 to 6 are the first step's, 7 and 8 are answered in the second, 9 and 10 are not."""
    config, reached = tmp_path / "config.toml", threading.Event()
    with serving(batch_invariant=True) as base, proxying(base) as proxy:
        train(served_config(tmp_path / "whole", base, run__steps=3))
        tree = served_config(
            tmp_path / "run", proxy.url, run__steps=3, teacher__timeout_s=30.0, teacher__max_concurrent_requests=1
        )
        config.write_text(tomli_w.dumps(tree))
        proxy.give(stall_from(PROBED + 9, reached))
        kill_when(reached, config)
        assert [path.name for path in (tmp_path / "run/rollouts").iterdir()] == ["step_000001.parquet"]
        proxy.give(None)
        finish(config)
        assert proxy.seen["score"] == 1 + PROBED + 2 + 4  # the canary, the probe, what was not answered, the third step
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    answered, completions = 2, 2
    assert [row["teacher/cached"] for row in metrics(tmp_path / "run")] == [0, answered * completions, 0]


@pytest.mark.slow
def test_a_trainer_killed_while_servers_sample(tmp_path: Path) -> None:
    """The step that was being sampled is sampled again, from weights that are handed over again."""
    config, reached = tmp_path / "config.toml", threading.Event()
    with serving("builtin:tiny-student", allow_reload=True, batch_invariant=True) as base, proxying(base) as proxy:
        train(sampling_config(tmp_path / "whole", base))
        config.write_text(tomli_w.dumps(sampling_config(tmp_path / "run", proxy.url, rollout__vllm__timeout_s=30.0)))
        proxy.give(stall_from(2 + GRADED_PROMPTS + 1 + 4 + 2, reached), "sample")  # probe, eval, step, half a step
        kill_when(reached, config)
        assert [path.name for path in (tmp_path / "run/rollouts").iterdir()] == ["step_000001.parquet"]
        proxy.give(None, "sample")
        finish(config)
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    assert not (tmp_path / "run/handover").exists()
