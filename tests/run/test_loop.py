"""A run of three steps, checked against its models from outside: settings, versions and random streams reach every stage."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.e2e.tiny import tiny_config
from topd import config_file, loop
from topd.models.language_model import LanguageModel
from topd.models.load import load
from topd.models.policy import frozen_copy
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams
from topd.types import Prompt

STEPS, PROMPTS, TEMPERATURE, TOP_P, SEED = 3, 4, 0.8, 0.6, 11


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples in bfloat16, so that old log-probs are recomputed. Updates are too small to change what is sampled."""
    folder = tmp_path_factory.mktemp("loop")
    changes = {
        "student__dtype": "bfloat16",
        "rollout__temperature": TEMPERATURE,
        "rollout__top_p": TOP_P,
        "trainer__minibatch_prompts": 1,
        "trainer__learning_rate": 1e-12,
        "eval__max_problems": 1,
        "eval__teacher": False,
        "run__steps": STEPS,
        "run__seed": SEED,
        "run__checkpoint_every": 10,
    }
    loop.run(config_file.load(tiny_config(folder / "run", **changes)))
    return folder / "run"


def rows(run: Path, kind: str, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / kind / f"step_{step:06d}.parquet").to_pylist()


def model(name: str) -> LanguageModel:
    return load(f"builtin:{name}", dtype="float32", device=torch.device("cpu"), role="model")


def distribution(of: LanguageModel, row: dict[str, Any]) -> torch.Tensor:
    """[token, vocab] log-probs at the completion's positions, at the temperature of the rollouts."""
    ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
    with torch.no_grad():
        logits = of.module(ids).logits.float()[0, len(row["prompt_ids"]) - 1 : -1, : of.vocab_size]
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def test_stored_log_probs_are_those_of_both_models_at_the_temperature(run: Path) -> None:
    student, teacher = model("tiny-student"), model("tiny-teacher")
    for row in rows(run, "rollouts", 1):
        picked = torch.tensor(row["completion_ids"])[:, None]
        for name, of in (("behaviour", student), ("old", student), ("teacher", teacher)):
            expected = distribution(of, row).gather(-1, picked).squeeze(-1)
            torch.testing.assert_close(torch.tensor(row[f"{name}_logprobs"]), expected, atol=1e-4, rtol=0, msg=name)
        rounded = distribution(student, row).gather(-1, picked).squeeze(-1) - torch.tensor(row["rollout_logprobs"])
        assert 1e-4 < float(rounded.abs().max()) < 0.3


def test_only_tokens_of_the_nucleus_are_sampled(run: Path) -> None:
    student = frozen_copy(model("tiny-student"), torch.bfloat16)
    for row in rows(run, "rollouts", 1):
        probs = distribution(student, row).exp()
        own = probs.gather(-1, torch.tensor(row["completion_ids"])[:, None])
        assert float(torch.where(probs > own, probs, 0.0).sum(-1).max()) < TOP_P + 0.01


def test_completions_are_those_of_the_stream_of_their_step(run: Path) -> None:
    engine = EmbeddedEngine(frozen_copy(model("tiny-student"), torch.bfloat16), max_concurrent_rollouts=16)
    settings = {"n": 2, "max_tokens": 24, "temperature": TEMPERATURE, "top_p": TOP_P}
    for step in (1, STEPS):
        stored = rows(run, "rollouts", step)
        prompts = [Prompt(id=row["prompt_id"], text="", token_ids=tuple(row["prompt_ids"])) for row in stored[::2]]
        groups = engine.generate(prompts, SamplingParams(**settings, seed=(SEED, "rollout", step)))
        found = [list(completion) for group in groups for completion in group.completions]
        assert found == [row["completion_ids"] for row in stored]


def test_every_step_has_another_order_of_mini_batches(run: Path) -> None:
    orders = set()
    for step in range(1, STEPS + 1):
        places = {row["prompt_id"]: i for i, row in enumerate(rows(run, "rollouts", step)[::2])}
        orders.add(tuple(places[row["prompt_id"]] for row in rows(run, "updates", step)[::2]))
    assert len(orders) == STEPS


def test_versions_and_counts_go_on_from_step_to_step(run: Path) -> None:
    """Four updates a step: rollouts of step 3 are of version 8, and its updates are numbers 9 to 12."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    total = 0
    for step, row in enumerate(metrics, 1):
        assert {stored["policy_version"] for stored in rows(run, "rollouts", step)} == {PROMPTS * (step - 1)}
        updates = sorted({stored["update"] for stored in rows(run, "updates", step)})
        assert updates == [PROMPTS * (step - 1) + i for i in range(1, PROMPTS + 1)]
        total += sum(len(stored["completion_ids"]) for stored in rows(run, "rollouts", step))
        assert (row["step"], row["policy_version"], row["tokens/total"]) == (step, PROMPTS * step, total)
        assert (row["policy/lag"], row["train/updates"]) == (0, PROMPTS)
