"""The local teacher scores the very tokens that were sampled, at the sampling temperature."""

from pathlib import Path

import torch

from tests.e2e.tiny import tiny_config
from tests.fakes import make_model, scored_groups
from topd import config_file
from topd.assemble import assemble
from topd.evidence import Wanted
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
        for completion, before, after in zip(
            group.completions, *(each.by_rollout("teacher_logprobs") for each in (one, two)), strict=True
        ):
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
        for rollout, logprobs in zip(group.rollouts, scores.by_rollout("teacher_logprobs"), strict=True):
            torch.testing.assert_close(logprobs, rollout.logprobs, atol=1e-5, rtol=0)


def test_the_likeliest_tokens_are_those_of_the_whole_distribution_with_end_tokens_exchanged() -> None:
    """All k of a vocabulary: their probabilities sum to 1, and each is the log-prob of that token as plain code computes it."""
    model, groups = make_model(seed=3), [scored.group for scored in scored_groups((3, 2), (1, 4))]
    wanted = Wanted(streams=frozenset({"teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"}), top_k=model.vocab_size)
    plain = LocalTeacher(model, temperature=0.7, max_tokens=16)
    assert wanted.streams <= plain.gives
    for group, row, alone in zip(groups, plain.score(groups, wanted), plain.score(groups), strict=True):
        assert row["teacher_top_ids"].shape == (row.num_tokens, model.vocab_size)
        torch.testing.assert_close(row["teacher_logprobs"], alone["teacher_logprobs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(row["teacher_top_logprobs"].exp().sum(-1), torch.ones(row.num_tokens))
        sampled = torch.tensor([token for completion in group.completions for token in completion])[:, None]
        place = (row["teacher_top_ids"] == sampled).int().argmax(-1, keepdim=True)
        torch.testing.assert_close(
            row["teacher_top_logprobs"].gather(-1, place)[:, 0], alone["teacher_logprobs"], atol=1e-5, rtol=0
        )
    few = Wanted(streams=wanted.streams, top_k=3)
    mapping = LocalTeacher(model, temperature=0.7, max_tokens=16, map_eos={2: 5})
    for before, after in zip(plain.score(groups, few), mapping.score(groups, few), strict=True):
        renamed = {2: 5, 5: 2}
        expected = [[renamed.get(token, token) for token in row] for row in before["teacher_top_ids"].tolist()]
        assert after["teacher_top_ids"].tolist() == expected
