"""teachers.json: who each served teacher was when its run first met it, so that a resumed run goes on with no other."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from topd.errors import ConfigError, first_line
from topd.run.digests import Digests
from topd.run.files import write_json


class Meeting(BaseModel):
    """How a teacher was asked, and what it answered."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    form: str
    """Name of the form in which it was asked."""
    fingerprint: str | None
    """Digest of its weights, where its server told one."""
    canary: list[FiniteFloat] = Field(min_length=1)
    """Log-probs of the canary, nats."""


_MEETINGS = TypeAdapter(dict[str, Meeting])


def read(path: Path, digests: Digests) -> dict[str, Meeting]:
    """By the teacher's section; empty if there is no such file. Raises ConfigError for a damaged one."""
    if not path.exists():
        return {}
    reason = digests.difference(path)
    try:
        met = _MEETINGS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = reason or ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    except OSError as error:
        reason = reason or first_line(error)
    if reason:
        raise ConfigError(
            f"{path} is damaged: {reason}. It holds what the served teachers answered when the run began. Put it back; or delete "
            "it, if you are sure that the teachers are the same, and the run goes on with those of now."
        )
    return met


def write(path: Path, met: Mapping[str, Meeting], digests: Digests) -> None:
    write_json(path, {role: meeting.model_dump() for role, meeting in met.items()}, digests.note)
