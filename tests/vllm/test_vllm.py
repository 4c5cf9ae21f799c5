"""A real vLLM as teacher and as rollout engine: numbers agree, weights are handed over, and a wrong hand-over is noticed."""

import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.vllm.server import make_folder, vllm_server
from topd import config_file
from topd.assemble import Parts, assemble, probe
from topd.endpoint.dialects import VllmEcho, VllmPromptLogprobs
from topd.errors import RunStopped
from topd.loop import run
from topd.models.export import export
from topd.models.logprobs import score_groups
from topd.rollout.engine import SamplingParams
from topd.run.files import read_lines
from topd.teacher.local import LocalTeacher

KINDS = ("tiny, tied", "tiny, untied", "SmolLM2-135M, tied", "SmolLM2-135M, untied")
QUESTIONS = [("3+4", "7"), ("2+9", "11"), ("5+5", "10"), ("8+6", "14"), ("1+7", "8"), ("9+9", "18"), ("4+2", "6"), ("6+7", "13")]


@dataclasses.dataclass(frozen=True)
class Served:
    kind: str
    folder: Path
    url: str

    @property
    def name(self) -> str:
        return self.kind.split(",")[0]


@pytest.fixture(scope="module", params=KINDS)
def served(request, tmp_path_factory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("vllm")
    folder = make_folder(request.param, base / "model")
    with vllm_server(folder, request.param.split(",")[0], log=base / "server.log") as url:
        yield Served(request.param, folder, url)


def config(served: Served, directory: Path, *, asks: str, **changes: object) -> dict:
    """The served model as teacher of itself, loaded here too; `asks` says for what the server is used."""
    data = directory.parent / "questions.jsonl"
    data.write_text("".join(f'{{"prompt": "{question}=", "answer": "{answer}"}}\n' for question, answer in QUESTIONS))
    teacher = {"name": served.name, "base_url": [served.url]} if asks == "teacher" else {"name": str(served.folder)}
    engine = {"engine": "vllm", "vllm": {"base_url": [served.url]}} if asks == "rollout" else {}
    return {
        "student": {"name": str(served.folder)},
        "teacher": teacher,
        "task": {"type": "jsonl", "path": str(data), "grader": "exact", "template": "plain"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 32} | engine | changes,
        "algorithm": {"type": "topd"},
        "trainer": {"minibatch_prompts": 2, "learning_rate": 1e-4},
        "run": {"directory": str(directory), "steps": 2, "threads": 1, "device": "cpu"},
    }


@pytest.fixture
def asking_teacher(served: Served, tmp_path: Path) -> Iterator[Parts]:
    """The server as teacher; these tests come first, as it must still have its own weights."""
    with closing(assemble(config_file.load(config(served, tmp_path / "run", asks="teacher")))) as parts:
        yield parts


@pytest.fixture
def sampling(served: Served, tmp_path: Path) -> Iterator[Parts]:
    """The server as rollout engine."""
    with closing(assemble(config_file.load(config(served, tmp_path / "run", asks="rollout")))) as parts:
        parts.engine.load_weights(0)
        yield parts


def test_versions_are_recorded(served: Served, measured) -> None:
    asked = "import torch, transformers, vllm; print(vllm.__version__, torch.__version__, transformers.__version__)"
    done = subprocess.run([os.environ["TOPD_VLLM_PYTHON"], "-c", asked], capture_output=True, text=True, check=True)
    measured(served.kind, "vllm, torch, transformers", done.stdout.split("\n")[-2])


def test_probe_is_content(asking_teacher: Parts) -> None:
    checks = probe(asking_teacher)
    assert all(check.ok for check in checks), checks
    assert "vLLM /v1/completions with prompt_logprobs" in checks[0].detail


@pytest.mark.parametrize("dialect", [VllmPromptLogprobs(), VllmEcho()], ids=["prompt_logprobs", "echo"])
def test_log_probs_of_the_teacher_agree_with_the_local_model(served: Served, asking_teacher: Parts, dialect, measured) -> None:
    parts = asking_teacher
    groups = parts.engine.generate(list(parts.prompts.prompts), SamplingParams(n=4, max_tokens=32))
    local = LocalTeacher(parts.student, temperature=1.0, max_tokens=4096).score(groups)
    parts.teacher.served.dialect = dialect
    began = time.perf_counter()
    found = parts.teacher.score(groups)
    seconds = time.perf_counter() - began
    difference = torch.cat([x["teacher_logprobs"] - y["teacher_logprobs"] for x, y in zip(found, local, strict=True)]).abs()
    assert float(difference.mean()) < 1e-3
    name = dialect.name.split()[-1]
    measured(
        served.kind, f"teacher, {name}: mean and largest difference, nats", f"{difference.mean():.1e}, {difference.max():.1e}"
    )
    measured(served.kind, f"teacher, {name}: completion tokens/s", f"{len(difference) / seconds:.0f}")


def test_training_with_the_server_as_teacher_is_training_with_the_local_one(served: Served, tmp_path: Path, measured) -> None:
    rows = {}
    for asks in ("teacher", "nothing"):
        run(config_file.load(config(served, tmp_path / asks, asks=asks)))
        rows[asks] = read_lines(tmp_path / asks / "metrics.jsonl")
    for name in ("token_reward/mean", "teacher/gap", "train/loss"):
        pairs = [(a[name], b[name]) for a, b in zip(rows["teacher"], rows["nothing"], strict=True)]
        assert all(abs(a - b) < 1e-4 for a, b in pairs), (name, pairs)
    measured(served.kind, "training, teacher served and local: equal to 1e-4 in reward, gap, loss", "yes")


def test_sampled_log_probs_and_ids_are_the_trainers(served: Served, sampling: Parts, measured) -> None:
    parts = sampling
    began = time.perf_counter()
    groups = parts.engine.generate(list(parts.prompts.prompts), SamplingParams(n=8, max_tokens=32))
    seconds = time.perf_counter() - began
    own = score_groups(parts.student, groups, max_tokens=4096)
    pairs = [
        (r.logprobs, o) for group, parts_ in zip(groups, own, strict=True) for r, o in zip(group.rollouts, parts_, strict=True)
    ]
    difference = torch.cat([a - b for a, b in pairs]).abs()
    assert float(difference.mean()) < 1e-3
    measured(served.kind, "rollouts: mean and largest difference, nats", f"{difference.mean():.1e}, {difference.max():.1e}")
    measured(served.kind, "rollouts: sampled tokens/s", f"{len(difference) / seconds:.0f}")


def test_changed_weights_are_handed_over_and_proven(served: Served, sampling: Parts, measured) -> None:
    parts = sampling
    change(parts, seed=1)
    began = time.perf_counter()
    parts.engine.load_weights(1)
    seconds = time.perf_counter() - began
    found = parts.engine.background.run(parts.engine.served.ask_canary(parts.engine.served.pool.replicas[0]))
    moved = float((parts.engine.proof.expected - parts.engine.proof.earlier[0]).abs().mean())
    off = float((parts.engine.proof.expected - found).abs().mean())
    assert off < 1e-3 < moved
    measured(served.kind, "hand-over: probe moved by, off by, nats", f"{moved:.2g}, {off:.1e}")
    measured(served.kind, "hand-over: seconds (write, reload, prove)", f"{seconds:.1f}")


def test_a_wrong_hand_over_is_an_error_that_says_where_to_look(served: Served, sampling: Parts, measured, monkeypatch) -> None:
    """The plain checkpoint of a tied model, which vLLM reloads without its output head, and says nothing."""
    parts = sampling
    transport = parts.engine.transport

    def publish(policy, dtype):
        if policy.module.config.tie_word_embeddings:
            export(policy, transport.folder)  # of an untied one nothing new is written

    monkeypatch.setattr(transport, "publish", publish)
    monkeypatch.setattr(transport, "commit", lambda: None)
    change(parts, seed=2)
    with pytest.raises(RunStopped, match="does not serve the weights of version 1") as error:
        parts.engine.load_weights(1)
    measured(served.kind, "wrong hand-over", str(error.value).split(". ")[0].partition("version 1: ")[2])


def test_training_with_rollouts_from_the_server(served: Served, tmp_path: Path, measured) -> None:
    for lag in (0, 1):
        directory = tmp_path / f"run{lag}"
        run(config_file.load(config(served, directory, asks="rollout", max_lag=lag)))
        rows = read_lines(directory / "metrics.jsonl")
        assert [row["policy/lag"] for row in rows] == [0, 2 * lag]
        assert all(row["policy/mismatch_kl"] < 1e-5 for row in rows)
        measured(served.kind, f"training, max_lag {lag}: mismatch KL", f"{max(row['policy/mismatch_kl'] for row in rows):.1e}")


def change(parts: Parts, *, seed: int) -> None:
    """Move the policy as far as a good many updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parts.student.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * parameter.std().nan_to_num(0.01) * noise)


def test_the_names_that_the_nccl_transport_needs_exist() -> None:
    """All that can be shown without a GPU."""
    asked = """
import inspect
from vllm.distributed.weight_transfer import base, clients, nccl_engine
print(list(inspect.signature(nccl_engine.NCCLTrainerInitInfo).parameters))
print(list(inspect.signature(nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init).parameters))
print(list(inspect.signature(clients.HTTPVLLMWeightSyncClient).parameters)[:1])
print(list(inspect.signature(base.ParamMeta).parameters), sorted(base.WeightSource.__abstractmethods__))
"""
    done = subprocess.run([os.environ["TOPD_VLLM_PYTHON"], "-c", asked], capture_output=True, text=True, check=True)
    init, trainer, client, source = done.stdout.splitlines()[-4:]
    assert all(f"'{name}'" in init for name in ("master_address", "master_port", "world_size", "rank"))
    assert trainer == "['init_info', 'client', 'source']"
    assert client == "['base_url']"
    assert source == "['name', 'dtype', 'shape'] ['__iter__', 'metadata']"
