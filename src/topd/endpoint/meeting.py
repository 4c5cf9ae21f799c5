"""teachers.json: identity of each served teacher at the start of its run, so that a resumed run refuses any other."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from topd.endpoint.card import first_problem
from topd.errors import ConfigError, first_line
from topd.run.digests import Digests
from topd.run.files import write_json


class Meeting(BaseModel):
    """Form of the first request to a teacher, and its answer."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    form: str
    """Name of the dialect."""
    fingerprint: str | None
    """Digest of its weights, if its server sent one."""
    canary: list[FiniteFloat] = Field(min_length=1)
    """Log-probs of the canary, nats."""


_MEETINGS = TypeAdapter(dict[str, Meeting])


def read(path: Path, digests: Digests) -> dict[str, Meeting]:
    """Meetings by the teacher's section; empty if there is no such file. Raises ConfigError for a damaged one."""
    if not path.exists():
        return {}
    reason = digests.difference(path)
    try:
        met = _MEETINGS.validate_json(path.read_bytes())
    except ValidationError as error:
        reason = reason or first_problem(error)
    except OSError as error:
        reason = reason or first_line(error)
    if reason:
        raise ConfigError(
            f"{path} is damaged: {reason}. It identifies the served teachers of this run. Restore it; or delete it, if you are "
            "sure that the teachers are the same, and the run continues with the present ones."
        )
    return met


def write(path: Path, met: Mapping[str, Meeting], digests: Digests) -> None:
    write_json(path, {role: meeting.model_dump() for role, meeting in met.items()}, digests.note)
