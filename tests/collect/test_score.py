"""Two log-probs with two jobs: where sampling is less precise than training, both are recomputed by the trainer's function."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.e2e.tiny import tiny_config
from tests.tasks.scorers import Buggy
from topd import config_file
from topd.assemble import assemble
from topd.collect.score import Sampler, score
from topd.errors import RunStopped
from topd.rollout.engine import SamplingParams
from topd.tasks.grading import Grader, Rule
from topd.teacher.local import DEFAULT, LocalTeacher


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_log_probs_replace_the_sampled_ones_and_keep_them(tmp_path: Path, dtype: str) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run", student__dtype=dtype)))
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), SamplingParams(n=2, max_tokens=12))
    ask = dict(grader=parts.grader, teacher=parts.teacher)
    settings = dict(weights_of=lambda version: parts.student, temperature=1.0, max_tokens=1000, max_mismatch_kl=0.1)
    scored = score(groups, sampler=Sampler(engine=parts.engine, policy=parts.student, **settings), **ask)
    sampled = torch.cat(
        [part for item in score(groups, sampler=None, **ask) for part in item.evidence.by_rollout("old_logprobs")]
    )
    found = torch.cat([part for item in scored for part in item.evidence.by_rollout("old_logprobs")])
    difference = float((sampled - found).abs().max())
    assert difference == 0 if dtype == "float32" else 1e-5 < difference < 0.3
    assert all(item.group is group for item, group in zip(scored, groups, strict=True))


def test_grades_and_errors_of_the_grader_are_per_group(tmp_path: Path) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), SamplingParams(n=2, max_tokens=12))
    first = groups[0].prompt.problem

    grader = Grader(Rule(score=Buggy(first.question), whole_text=True), workers=1)
    scored = score(groups, grader=grader, teacher=None, sampler=None)
    grader.close()
    assert [item.num_grader_errors for item in scored] == [2, 0]
    assert [item.evidence["grades"].tolist() for item in scored] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    "change", [lambda p: p * float("nan"), lambda p: p[1:], lambda p: -p - 1], ids=["NaN", "too few", "above 0"]
)
def test_scores_that_are_no_log_probs_stop_the_run_before_anything_is_stored(tmp_path: Path, change) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), SamplingParams(n=2, max_tokens=12))

    class Broken(LocalTeacher):
        def score(self, groups, wanted=DEFAULT, *, on_tokens=lambda n: None):
            rows = super().score(groups)
            return [dataclasses.replace(row, tokens={"teacher_logprobs": change(row["teacher_logprobs"])}) for row in rows]

    broken = Broken(parts.teacher.model, temperature=1.0, max_tokens=1000)
    with pytest.raises(RunStopped, match=groups[0].prompt.id):
        score(groups, grader=parts.grader, teacher=broken, sampler=None)
