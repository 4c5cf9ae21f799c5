"""The Python interface: `topd.train`, `topd.evaluate`, `topd.grade`, and `topd.topd_advantages` for authors of other trainers."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topd.config import Config


def train(config: "Config | str | Path | Mapping[str, Any]", *overrides: str) -> dict[str, Any]:
    """Run the main job and return the contents of summary.json.

    `config`: a `Config`, the path of a TOML file, the name of a shipped one, or a nested mapping; `overrides` are the command
    line's words, for example `topd.train("quickstart", "--run.steps", "4")`.
    Raises ConfigError for input that cannot be used, and RunStopped for a run that stopped and can be resumed.
    """
    from topd import config_file, loop
    from topd.report.at_end import ReportAtEnd
    from topd.run.progress import Display
    from topd.trackers import Trackers

    config, display = config_file.load(config, overrides), Display()
    path = Path(os.path.expanduser(config.run.directory))
    trackers = Trackers(config.run.trackers, path, config.model_dump(mode="json"), display.line)
    return loop.run(config, display, [trackers, ReportAtEnd(path, display.line)])


def evaluate(model: str | Path, config: "Config | str | Path | Mapping[str, Any]", *overrides: str) -> list[dict[str, Any]]:
    """avg@k, pass@k and intervals of a model, named like `student.name`, on the configuration's benchmarks: one row each."""
    from topd import config_file
    from topd.eval.standalone import evaluate_model

    return evaluate_model(str(model), config_file.load(config, overrides))


def grade(
    config: "Config | str | Path | Mapping[str, Any]", rows: Iterable[Mapping[str, Any]], *overrides: str
) -> list[dict[str, Any]]:
    """Grade given completions by the configuration's task: {"extracted", "grade", "error"} for every row, in order.

    A row is {"answer": ..., "completion": ...}; `question` selects the item of a reasoning_gym task, whose scorer may need more
    than the answer. `extracted` is the final answer that was compared, None if there is none; `grade` is in [0, 1]; `error` is
    the reason if no grade could be computed. Raises ConfigError for rows of another form.
    """
    from topd import config_file
    from topd.tasks.regrade import grade_rows

    return list(grade_rows(config_file.load(config, overrides), rows))


def rescore(run: str | Path, *overrides: str) -> dict[str, Any]:
    """Recompute the credit of a run's stored rollouts under other settings and compare; also writes RUN/rescores/NAME.json.

    `overrides` are the command line's words: `topd.rescore("runs/mine", "--algorithm.alpha", "0.1")`. The keys are those of
    `topd.report.rescoring.rescore.Rescore`. Raises ConfigError for what cannot be recomputed.
    """
    from topd.report.rescoring.rescore import rescore as recompute

    return dict(recompute(run, overrides))


def topd_advantages(
    teacher_logprobs: Sequence[Tensor], behaviour_logprobs: Sequence[Tensor], *, alpha: float = 0.2
) -> list[Tensor]:
    """TOP-D's per-token advantages for one group: bounded reward, Eq. 8, normalisation over the group's tokens.

    Both lists hold one 1-D float tensor per completion, equal lengths pairwise, in nats; only tokens the policy sampled belong
    in them. Any device and float dtype. Returns one float32 tensor per completion, detached, of the same lengths and on the same
    device. For alpha < 1 they are finite even where a teacher log-prob is -inf.
    Raises ValueError for an empty or single-completion group, unequal lengths, tensors that are not 1-D floats or hold NaN, or
    alpha outside (0, 1]. Source: arXiv 2607.04751, its Algorithm 1; see `topd.algorithms.topd`.
    """
    from topd.algorithms import topd as algorithm
    from topd.ragged import Ragged

    _check_group(teacher_logprobs, behaviour_logprobs)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha!r}")
    lengths = [len(part) for part in behaviour_logprobs]
    teacher, behaviour = (torch.cat(list(parts)).detach().cpu().float() for parts in (teacher_logprobs, behaviour_logprobs))
    credit = algorithm.credit(
        Ragged.of([behaviour_logprobs]).adding(behaviour_logprobs=behaviour, teacher_logprobs=teacher),
        algorithm.Config(alpha=float(alpha)),
    )
    return list(credit.advantages.to(behaviour_logprobs[0].device).split(lengths))


def _check_group(teacher_logprobs: Sequence[Tensor], behaviour_logprobs: Sequence[Tensor]) -> None:
    if len(teacher_logprobs) != len(behaviour_logprobs):
        raise ValueError(f"one teacher tensor per completion: got {len(teacher_logprobs)} for {len(behaviour_logprobs)}")
    if len(behaviour_logprobs) < 2:
        raise ValueError(f"a group needs at least 2 completions, got {len(behaviour_logprobs)}: the group is the baseline")
    for i, (teacher, behaviour) in enumerate(zip(teacher_logprobs, behaviour_logprobs, strict=True)):
        if not (isinstance(teacher, Tensor) and isinstance(behaviour, Tensor)):
            raise ValueError(
                f"completion {i}: log-probs must be tensors, got {type(teacher).__name__}, {type(behaviour).__name__}"
            )
        if teacher.ndim != 1 or teacher.shape != behaviour.shape or len(teacher) == 0:
            raise ValueError(
                f"completion {i}: need two 1-D tensors of one non-zero length, got shapes {tuple(teacher.shape)} and "
                f"{tuple(behaviour.shape)}"
            )
        if not (teacher.is_floating_point() and behaviour.is_floating_point()):
            raise ValueError(f"completion {i}: log-probs must be floats, got {teacher.dtype} and {behaviour.dtype}")
        if bool(teacher.isnan().any()) or not bool(behaviour.isfinite().all()):
            raise ValueError(f"completion {i}: NaN teacher or non-finite behaviour log-probs")
