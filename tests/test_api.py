"""The Python interface."""

from pathlib import Path

import pytest
import torch

import topd
from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.config import Config
from topd.errors import ConfigError

TEACHER = [[-0.3, -2.0, -0.2], [-0.1, -0.6]]
BEHAVIOUR = [[-0.5, -1.0, -0.2], [-0.4, -0.1]]


def tensors(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=dtype) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_published_vector(dtype: torch.dtype) -> None:
    found = topd.topd_advantages(tensors(TEACHER, dtype), tensors(BEHAVIOUR, dtype), alpha=0.2)
    expected = [[0.4772, -1.4909, 0.9075], [0.6532, -0.5469]]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.tolist() == pytest.approx(other, abs=1e-4)


def test_a_rejected_token_stays_finite_and_inputs_are_left_alone() -> None:
    teacher, behaviour = tensors([[-float("inf"), -1.0], [-0.1]]), tensors([[-1.0, -1.0], [-0.2]])
    kept = [part.clone() for part in teacher]
    assert all(bool(part.isfinite().all()) for part in topd.topd_advantages(teacher, behaviour))
    assert all(torch.equal(one, other) for one, other in zip(kept, teacher, strict=True))


@pytest.mark.parametrize(
    ("teacher", "behaviour", "alpha", "said"),
    [
        ([[-1.0]], [[-1.0]], 0.2, "at least 2"),
        ([[-1.0], [-1.0]], [[-1.0]], 0.2, "one teacher tensor per completion"),
        ([[-1.0, -1.0], [-1.0]], [[-1.0], [-1.0]], 0.2, "completion 0"),
        ([[-1.0], []], [[-1.0], []], 0.2, "completion 1"),
        ([[-1.0], [float("nan")]], [[-1.0], [-1.0]], 0.2, "NaN"),
        ([[-1.0], [-1.0]], [[-1.0], [-1.0]], 0.0, "alpha"),
        ([[-1.0], [-1.0]], [[-1.0], [-1.0]], 1.5, "alpha"),
    ],
)
def test_wrong_input_is_refused(teacher, behaviour, alpha: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        topd.topd_advantages(tensors(teacher), tensors(behaviour), alpha=alpha)


def test_a_config_object_is_checked_like_a_mapping(tmp_path: Path) -> None:
    good = config_file.load(tiny_config(tmp_path / "run", run__steps=1, eval__max_problems=1))
    assert topd.train(good)["steps"] == 1
    loose = Config.model_validate(tiny_config(tmp_path / "other", rollout__group_size=1))
    with pytest.raises(ConfigError, match=r"rollout\.group_size must be >= 2"):
        topd.train(loose)


LOW = {"student__dtype": "bfloat16", "trainer__dtype": "bfloat16", "teacher__dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changes", [{}, {"teacher__dtype": "bfloat16"}, {"trainer__dtype": "bfloat16"}, LOW], ids=lambda changes: ",".join(changes)
)
def test_the_student_as_its_own_teacher_learns_nothing(tmp_path: Path, changes: dict[str, str]) -> None:
    """Rounding between sampling and scoring must not become advantages: every one is 0, and no weight moves."""
    from safetensors.torch import load_file

    from topd.models.load import BUILTIN

    topd.train(tiny_config(tmp_path / "run", teacher__name="builtin:tiny-student", run__steps=1, eval__max_problems=1, **changes))
    trained = load_file(tmp_path / "run/model/model.safetensors")
    for name, weight in load_file(BUILTIN / "tiny-student/model.safetensors").items():
        assert torch.equal(trained[name], weight.float()), name
    import json

    row = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert row["advantage/degenerate_groups"] == 1.0
    assert row["token_reward/mean"] == 0.0
