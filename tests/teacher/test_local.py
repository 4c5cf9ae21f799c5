"""The local teacher scores the very tokens that were sampled, at the sampling temperature."""

from pathlib import Path

import torch

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.assemble import assemble
from topd.rollout.engine import SamplingParams
from topd.teacher.local import LocalTeacher


def test_mapping_the_end_token_changes_the_last_log_prob_alone(tmp_path: Path) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))
    [eos], other = parts.student.eos_token_ids, parts.student.tokenizer.convert_tokens_to_ids(";")
    groups = parts.engine.generate(list(parts.prompts.prompts[:3]), SamplingParams(n=2, max_tokens=40))
    plain = LocalTeacher(parts.teacher.model, temperature=1.0, max_tokens=1000).score(groups)
    mapped = LocalTeacher(parts.teacher.model, temperature=1.0, max_tokens=1000, map_eos={eos: other}).score(groups)
    stopped = 0
    for group, one, two in zip(groups, plain, mapped, strict=True):
        for completion, before, after in zip(group.completions, one, two, strict=True):
            assert torch.equal(before[:-1], after[:-1])
            assert (before[-1] != after[-1]) == (completion[-1] == eos)
            stopped += completion[-1] == eos
    assert stopped > 0


def test_temperature_sharpens_student_and_teacher_alike(tmp_path: Path) -> None:
    parts = assemble(
        config_file.load(tiny_config(tmp_path / "run", teacher__name="builtin:tiny-student", rollout__temperature=0.5))
    )
    params = SamplingParams(n=2, max_tokens=12, temperature=0.5)
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), params)
    for group, scores in zip(groups, parts.teacher.score(groups), strict=True):
        for rollout, logprobs in zip(group.rollouts, scores, strict=True):
            torch.testing.assert_close(logprobs, rollout.logprobs, atol=1e-5, rtol=0)
