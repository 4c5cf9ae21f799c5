"""Comparison of a served teacher with its weights, if available: the laws of probe_numbers.py hold for every model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from topd.endpoint.faults import Fault
from topd.endpoint.served import CANARY_TOLERANCE
from topd.errors import ConfigError, first_line
from topd.models.language_model import LanguageModel
from topd.models.load import load, place
from topd.models.logprobs import TokenGroup, Tokens, score_groups
from topd.models.proof import distance, make_canary, probe_logprobs
from topd.teacher.served import EndpointTeacher
from topd.teacher.teacher import Check, Scores

SAME_MODEL = 0.02
"""Nats, mean difference: a server's rounding is below it, another model of the same family above."""

LARGEST_WEIGHTS = 2_000_000_000
"""Largest size in bytes of weight files that are loaded for the comparison."""


def check_weights(teacher: EndpointTeacher, student: LanguageModel, groups: Sequence[TokenGroup]) -> Check:
    """The served log-probs of the canary and of the probe's rollouts must be those of the weights, up to rounding."""
    name, role = "teacher weights", teacher.role
    key, source = weights_at_hand(teacher, student)
    compared = [make_canary(student.tokenizer), *(Tokens(group.prompt_ids, group.completions) for group in groups)]
    try:
        served = teacher.log_probs(compared, temperature=1.0)
    except Fault as fault:
        return Check(name=name, ok=False, detail=f"the teacher did not answer: {fault}")
    if source is None:
        return _not_compared(role, distance(_flat(served[:1]), probe_logprobs(student, compared[:1])))
    try:
        model = load(source, dtype=teacher.config.dtype, device=student.device, role=role)
    except ConfigError as error:
        return Check(name=name, ok=True, detail=f"not compared: {first_line(error)}", unproven=True)
    own = score_groups(model, compared, max_tokens=4096)
    off = [distance(_flat(a), _flat(b)) for a, b in ((served[:1], own[:1]), (served[1:], own[1:]))]
    detail = (
        f"the servers' log-probs differ from those of {key} = {source!r} by {off[0]:.2g} nats on fixed tokens, {off[1]:.2g} on "
        "rollouts"
    )
    if max(off) <= CANARY_TOLERANCE:
        return Check(name=name, ok=True, detail=detail)
    return Check(
        name=name,
        ok=False,
        detail=f"{detail}; {CANARY_TOLERANCE:g} allowed. The servers have other weights, another precision, or change the "
        f"numbers. Serve those weights, or set {role}.tokenizer to a folder without weights.",
    )


def _not_compared(role: str, from_student: float) -> Check:
    """Result without weights. `from_student`: nats between the served log-probs and the student's."""
    detail = (
        f"not compared: they are not available, so it is not proven which model answers. Set {role}.tokenizer to the teacher's "
        f"folder to compare (up to {LARGEST_WEIGHTS / 1e9:g} GB)"
    )
    is_student = from_student <= SAME_MODEL
    if is_student:
        detail = (
            f"the servers' log-probs equal the student's ({from_student:.2g} nats apart): do they serve the student? {detail}"
        )
    return Check(name="teacher weights", ok=True, detail=detail, warning=is_student, unproven=True)


def weights_at_hand(teacher: EndpointTeacher, student: LanguageModel) -> tuple[str, str | None]:
    """Key and name of a local folder with the teacher's weights. The student's folder, given as tokenizer, does not count."""
    config = teacher.config
    for key, name in (("name", config.name), ("tokenizer", config.tokenizer)):
        if name is None or (key == "tokenizer" and _folder(name) == _folder(student.name)):
            continue
        size = sum(file.stat().st_size for file in _folder(name).glob("*.safetensors"))
        if (_folder(name) / "config.json").is_file() and 0 < size <= LARGEST_WEIGHTS:
            return f"{teacher.role}.{key}", name
    return "", None


def _folder(name: str) -> Path:
    """Local folder of a model name; it need not exist."""
    return Path(place(name)).expanduser()


def _flat(scores: Sequence[Scores]) -> Tensor:
    return torch.cat([part for parts in scores for part in parts])
