"""A stored step is read back as it was: every stream in its own column, also where no two of them are alike."""

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.fakes import evidence, scored_groups, without_teacher
from topd.errors import ConfigError
from topd.run import rollouts
from topd.trainer.batch import flatten
from topd.types import Credit, Rollout, ScoredGroup

SHAPES = ((3, 2), (1, 4, 2))
STREAMS = ("behaviour_logprobs", "old_logprobs", "teacher_logprobs")


def distinct(number: int, scored: ScoredGroup) -> ScoredGroup:
    """The group with numbers that say where they belong: group, stream, completion, token."""

    def stream(of: int) -> tuple[Tensor, ...]:
        return tuple(-(number + of / 10 + i / 100 + torch.arange(len(c)) / 1000) for i, c in enumerate(scored.group.completions))

    sampled = stream(4)
    rollouts = tuple(
        Rollout(token_ids=r.token_ids, logprobs=part, finish_reason="length" if i else "stop", text=f"{number}/{i}")
        for i, (r, part) in enumerate(zip(scored.group.rollouts, sampled, strict=True))
    )
    prompt = dataclasses.replace(scored.group.prompt, answer=f"answer {number}", domain=f"domain {number}")
    group = dataclasses.replace(scored.group, prompt=prompt, rollouts=rollouts, policy_version=7 + number)
    grades = torch.arange(len(rollouts)) / 8 + number / 2
    streams = {name.removesuffix("_logprobs"): stream(of) for of, name in enumerate(STREAMS, 1)}
    return dataclasses.replace(scored, group=group, evidence=evidence(grades, **streams), num_grader_errors=number)


@pytest.fixture
def groups() -> list[ScoredGroup]:
    return [distinct(number, scored) for number, scored in enumerate(scored_groups(*SHAPES))]


@pytest.fixture
def path(tmp_path: Path, groups: list[ScoredGroup]) -> Path:
    rollouts.write(tmp_path / "step.parquet", groups, flatten(groups), credit_of(groups))
    return tmp_path / "step.parquet"


def credit_of(groups: list[ScoredGroup]) -> Credit:
    number = torch.arange(float(flatten(groups).lengths.sum()))
    return Credit(advantages=number + 0.75, token_rewards=number + 0.25, returns=number + 0.5)


def test_every_stream_is_read_from_its_own_column(path: Path, groups: list[ScoredGroup]) -> None:
    found = rollouts.read(path, [scored.group.prompt for scored in groups])
    assert len(found) == len(groups)
    for one, other in zip(found, groups, strict=True):
        for name in STREAMS:
            assert one.evidence[name].tolist() == other.evidence[name].tolist(), name
        for mine, theirs in zip(one.group.rollouts, other.group.rollouts, strict=True):
            assert mine.logprobs.tolist() == theirs.logprobs.tolist()
            assert (mine.token_ids, mine.finish_reason, mine.text) == (theirs.token_ids, theirs.finish_reason, theirs.text)
        assert one.evidence["grades"].tolist() == other.evidence["grades"].tolist()
        assert one.evidence["grades"].dtype == torch.float32
        assert one.evidence.lengths.tolist() == other.evidence.lengths.tolist()
        assert (one.num_grader_errors, one.group.policy_version) == (other.num_grader_errors, other.group.policy_version)
        assert one.group.prompt is other.group.prompt


def test_every_stream_is_written_to_the_column_of_its_name(path: Path, groups: list[ScoredGroup]) -> None:
    rows = iter(pq.read_table(path).to_pylist())
    credit = credit_of(groups)
    at = 0
    for scored in groups:
        for i, rollout in enumerate(scored.group.rollouts):
            row, end = next(rows), at + len(rollout.token_ids)
            expected = {name: scored.evidence.by_rollout(name)[i] for name in STREAMS} | {"rollout_logprobs": rollout.logprobs}
            expected |= {name: getattr(credit, name)[at:end] for name in ("token_rewards", "returns", "advantages")}
            assert {name: row[name] for name in expected} == {name: part.tolist() for name, part in expected.items()}
            prompt = scored.group.prompt
            assert (row["prompt_id"], row["answer"], row["domain"]) == (prompt.id, prompt.answer, prompt.domain)
            assert (row["prompt"], tuple(row["prompt_ids"])) == (prompt.text, prompt.token_ids)
            assert row["grade"] == float(scored.evidence["grades"][i])
            at = end
    assert next(rows, None) is None


def test_groups_come_in_the_order_of_the_prompts_without_those_that_were_dropped(path: Path, groups: list[ScoredGroup]) -> None:
    prompts = [scored.group.prompt for scored in groups]
    dropped = dataclasses.replace(prompts[0], id="train/99")
    found = rollouts.read(path, [prompts[1], dropped, prompts[0]])
    assert [scored.group.prompt.id for scored in found] == ["train/1", "train/0"]
    with pytest.raises(ConfigError, match="does not hold this step's prompts"):
        rollouts.read(path, prompts[:1])


def test_without_a_teacher_nothing_is_made_up(tmp_path: Path, groups: list[ScoredGroup]) -> None:
    untaught = [dataclasses.replace(scored, evidence=without_teacher(scored.evidence)) for scored in groups]
    rollouts.write(tmp_path / "step.parquet", untaught, flatten(untaught), credit_of(untaught))
    found = rollouts.read(tmp_path / "step.parquet", [scored.group.prompt for scored in untaught])
    assert not any("teacher_logprobs" in scored.evidence for scored in found)
    assert found[1].evidence["old_logprobs"].tolist() == groups[1].evidence["old_logprobs"].tolist()


def with_top(groups: list[ScoredGroup], k: int = 3) -> list[ScoredGroup]:
    """The groups with the streams of a teacher that gave its k likeliest tokens."""

    def more(scored: ScoredGroup) -> ScoredGroup:
        numbers = torch.arange(scored.evidence.num_tokens * k).reshape(-1, k)
        return dataclasses.replace(
            scored, evidence=scored.evidence.adding(teacher_top_ids=numbers, teacher_top_logprobs=-numbers / 8)
        )

    return list(map(more, groups))


def test_streams_with_k_entries_per_token_are_read_as_written(tmp_path: Path, groups: list[ScoredGroup]) -> None:
    more, file = with_top(groups), tmp_path / "top.parquet"
    rollouts.write(file, more, flatten(more), credit_of(more))
    for row, expected in zip(rollouts.read(file, [scored.group.prompt for scored in more]), more, strict=True):
        assert row.evidence.tokens.keys() == expected.evidence.tokens.keys()
        for name, stream in expected.evidence.tokens.items():
            assert torch.equal(row.evidence[name], stream), name
            assert row.evidence[name].dtype == stream.dtype


def test_lists_of_unequal_k_are_damage(tmp_path: Path, groups: list[ScoredGroup]) -> None:
    more, file = with_top(groups), tmp_path / "top.parquet"
    rollouts.write(file, more, flatten(more), credit_of(more))
    table = pq.read_table(file)
    cells = table["teacher_top_ids"].to_pylist()
    cells[0][0] = cells[0][0][:-1]
    place = table.schema.get_field_index("teacher_top_ids")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(cells, table.schema.field(place).type)), file)
    with pytest.raises(ConfigError, match=r"damaged: its lists have \[2, 3\] entries"):
        rollouts.read(file, [scored.group.prompt for scored in more])
