"""The pair is proven before anything is spent; every misfit has its message."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.assemble import assemble, probe, require
from topd.errors import ConfigError
from topd.evidence import Wanted
from topd.models.load import BUILTIN
from topd.models.logprobs import score_groups
from topd.rollout.engine import SamplingParams
from topd.teacher.fit import check_end_tokens, end_token_map
from topd.teacher.local import DEFAULT, LocalTeacher
from topd.teacher.probe import check_run, check_self_teacher, own_noise


def checks(tmp_path: Path, **changes: object) -> dict:
    return {check.name: check for check in probe(assemble(config_file.load(tiny_config(tmp_path / "run", **changes))))}


@pytest.fixture
def teacher_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN / "tiny-teacher", tmp_path / "teacher"))


def edit_json(path: Path, change) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def test_the_shipped_pair_passes_every_check(tmp_path: Path) -> None:
    found = checks(tmp_path)
    fits = ("vocabulary", "end token", "context", "evidence", "temperature")
    numbers = ("teacher log-probs", "teacher prefixes", "teacher probabilities", "student as own teacher")
    assert list(found) == [*fits, *numbers, "right answers", "grades of the student", "grades of the teacher"]
    assert all(check.ok for check in found.values())


def test_other_vocabularies_are_refused(tmp_path: Path, teacher_folder: Path) -> None:
    def swap(tree: dict) -> None:
        vocabulary = tree["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]

    edit_json(teacher_folder / "tokenizer.json", swap)
    found = checks(tmp_path, teacher__name=str(teacher_folder))
    assert list(found) == ["vocabulary"]
    assert not found["vocabulary"].ok
    assert "'1', '2'" in found["vocabulary"].detail
    with pytest.raises(ConfigError, match="do not fit"):
        require(list(found.values()))


def test_padded_embedding_rows_are_allowed(tmp_path: Path, teacher_folder: Path) -> None:
    weights = load_file(teacher_folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([embedding, torch.ones(3, embedding.shape[1], dtype=embedding.dtype)])
    save_file(weights, teacher_folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(teacher_folder / "config.json", lambda tree: tree.update(vocab_size=len(embedding) + 3))
    found = checks(tmp_path, teacher__name=str(teacher_folder))
    assert all(check.ok for check in found.values())
    assert "padding" in found["vocabulary"].detail


def test_another_end_token_is_refused_unless_it_is_mapped(tmp_path: Path, teacher_folder: Path) -> None:
    edit_json(teacher_folder / "tokenizer_config.json", lambda tree: tree.update(eos_token=";"))
    found = checks(tmp_path, teacher__name=str(teacher_folder))
    assert not found["end token"].ok
    assert "map_eos = true in the teacher's section" in found["end token"].detail
    mapped = checks(tmp_path, teacher__name=str(teacher_folder), teacher__map_eos=True)
    assert mapped["end token"].ok


@pytest.mark.parametrize(
    ("student_ends", "teacher_ends", "expected"),
    [
        ((1,), (1,), {1: 1}),
        ((1, 4), (1, 4), {1: 1, 4: 4}),
        ((1, 4), (1,), {1: 1, 4: 1}),
        ((1,), (4, 1), {1: 4}),
        ((1,), (4,), {1: 4}),
    ],
)
def test_every_end_token_of_the_student_finds_one_the_teacher_ends_with(
    tmp_path: Path, student_ends: tuple[int, ...], teacher_ends: tuple[int, ...], expected: dict[int, int]
) -> None:
    student = assemble(config_file.load(tiny_config(tmp_path / "run"))).student
    student = dataclasses.replace(student, eos_token_ids=student_ends)
    assert end_token_map(student_ends, teacher_ends) == expected
    assert check_end_tokens(student, teacher_ends, False).ok == (list(expected) == list(expected.values()))
    assert check_end_tokens(student, teacher_ends, True).ok


def test_a_teacher_that_is_only_evaluated_needs_the_same_vocabulary(tmp_path: Path, teacher_folder: Path) -> None:
    edit_json(teacher_folder / "tokenizer.json", lambda tree: tree["model"]["vocab"].update({"1": 4, "2": 3}))
    found = checks(tmp_path, teacher__name=str(teacher_folder), algorithm={"type": "grpo"})
    assert not found["vocabulary"].ok


def test_a_teacher_with_a_short_context_is_refused(tmp_path: Path, teacher_folder: Path) -> None:
    edit_json(teacher_folder / "config.json", lambda tree: tree.update(max_position_embeddings=20))
    found = checks(tmp_path, teacher__name=str(teacher_folder))
    assert not found["context"].ok
    assert "rollout.max_completion_tokens" in found["context"].detail


def test_a_teacher_that_ignores_the_temperature_is_refused_at_any_other_than_one(tmp_path: Path) -> None:
    for temperature, expected in ((1.0, True), (0.7, False)):
        parts = assemble(config_file.load(tiny_config(tmp_path / "run", rollout__temperature=temperature)))

        class AtOne(LocalTeacher):
            honours_temperature = False

        parts.teacher.__class__ = AtOne
        found = check_run(
            parts.config,
            student=parts.student,
            engine=parts.engine,
            teacher=parts.teacher,
            prompts=parts.prompts.prompts,
        )
        assert {check.name: check.ok for check in found}["temperature"] is expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_student_is_its_own_teacher_with_reward_zero(tmp_path: Path, temperature: float) -> None:
    found = checks(tmp_path, teacher__name="builtin:tiny-student", rollout__temperature=temperature)
    assert found["student as own teacher"].ok


@pytest.mark.parametrize("section", ["teacher", "trainer"])
def test_the_student_is_scored_in_the_precision_of_the_run(tmp_path: Path, section: str) -> None:
    """What a bfloat16 copy of it, or its own bfloat16 pass, makes of the same tokens is shown; credit takes none of it."""
    own = checks(tmp_path, **{"teacher__name": "builtin:tiny-student", f"{section}__dtype": "bfloat16"})["student as own teacher"]
    assert own.ok
    assert not own.warning
    found = re.search(r"by (\S+) nats a token .* root mean square up to (\S+) in a group:", own.detail)
    assert found is not None, own.detail
    mean, largest = map(float, found.groups())
    assert 2e-4 < mean < largest < 0.05
    assert "no advantage, as algorithm.rounding = 0.1" in own.detail


def test_rounding_that_is_set_too_low_is_warned_about_with_the_value_to_set(tmp_path: Path) -> None:
    changes = {"teacher__name": "builtin:tiny-student", "teacher__dtype": "bfloat16"}
    own = checks(tmp_path, **changes, algorithm__rounding=1e-3)["student as own teacher"]
    assert own.ok
    assert own.warning
    found = re.search(r"above algorithm.rounding = 0.001: .*Set algorithm.rounding = (\S+), or float32", own.detail)
    assert found is not None, own.detail
    assert not checks(tmp_path, **changes, algorithm__rounding=float(found.group(1)))["student as own teacher"].warning


def test_noise_of_the_teachers_precision_is_that_of_the_teacher_loaded_so(tmp_path: Path) -> None:
    """The probe's copy gives what a run's own LocalTeacher, loaded in bfloat16, gives for the student's weights."""
    parts = assemble(config_file.load(tiny_config(tmp_path, teacher__name="builtin:tiny-student", teacher__dtype="bfloat16")))
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), SamplingParams(n=2, max_tokens=16))
    own = score_groups(parts.student, groups, max_tokens=4096)
    pairs = zip(own, parts.teacher.score(groups), strict=True)
    spread = [float((theirs["teacher_logprobs"] - torch.cat(mine)).square().mean().sqrt()) for mine, theirs in pairs]
    assert own_noise(parts.config, parts.student, groups, own)[1] == pytest.approx(max(spread), rel=1e-4)


def test_an_algorithm_that_takes_the_log_ratio_as_it_is_says_so(tmp_path: Path) -> None:
    own = checks(tmp_path, teacher__dtype="bfloat16", algorithm={"type": "opd"})["student as own teacher"]
    assert own.detail.endswith(
        ', and algorithm.type = "opd" learns from it. Set float32 for teacher and trainer, or algorithm.type = "topd", which '
        "ignores noise below algorithm.rounding."
    )
    asked_nothing = checks(tmp_path, trainer__dtype="bfloat16", algorithm={"type": "grpo"})["student as own teacher"]
    assert "differs from itself" not in asked_nothing.detail


def test_sampling_from_other_weights_than_the_trainers_is_noticed(tmp_path: Path) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))
    groups = parts.engine.generate(list(parts.prompts.prompts[:2]), SamplingParams(n=2, max_tokens=8))
    assert check_self_teacher(parts.config, parts.student, groups).ok
    with torch.no_grad():
        parts.student.module.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert not check_self_teacher(parts.config, parts.student, groups).ok


def test_wrong_scores_are_noticed(tmp_path: Path) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))

    class Broken(LocalTeacher):
        def __init__(self, change) -> None:
            super().__init__(parts.teacher.model, temperature=1.0, max_tokens=1000)
            self.change = change

        def score(self, groups, wanted=DEFAULT, *, on_tokens=lambda n: None):
            rows = super().score(groups)
            return [dataclasses.replace(row, tokens={"teacher_logprobs": self.change(row["teacher_logprobs"])}) for row in rows]

    for change in (lambda part: part[1:], lambda part: part * float("nan"), lambda part: -part):
        found = check_run(
            parts.config,
            student=parts.student,
            engine=parts.engine,
            teacher=Broken(change),
            prompts=parts.prompts.prompts,
        )
        assert not {check.name: check for check in found}["teacher log-probs"].ok


def test_a_teacher_that_lacks_what_the_algorithm_needs_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    parts = assemble(config_file.load(tiny_config(tmp_path / "run")))

    class Plain(LocalTeacher):
        gives = frozenset({"teacher_logprobs"})

        def score(self, groups, wanted=DEFAULT, *, on_tokens=lambda n: None):
            raise AssertionError("asked")

    wanted = Wanted(streams=frozenset({"teacher_logprobs", "teacher_top_ids"}), top_k=2)
    teacher = Plain(parts.teacher.model, temperature=1.0, max_tokens=1000)
    made = check_run(
        parts.config, student=parts.student, engine=parts.engine, teacher=teacher, wanted=wanted, prompts=parts.prompts.prompts
    )
    check = {check.name: check for check in made}["evidence"]
    assert not check.ok
    assert "needs teacher_top_ids, which this teacher does not give" in check.detail
