"""Cards of a server's models: its answer to GET /v1/models, checked before any of it is used or printed."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from topd.endpoint.faults import BadAnswer

LARGEST = 2**31 - 1
"""Bound of token ids and context lengths, above those of any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCard:
    """One model as a server describes it."""

    id: str
    root: str
    context_length: int | None
    fingerprint: str | None
    """Digest of the weights, if the server sends it (`topd serve` does)."""
    eos_token_ids: tuple[int, ...] | None


def read_cards(url: str, body: bytes) -> list[ServedCard]:
    """Cards in an answer of the server at `url`. Raises BadAnswer naming the first invalid value."""
    try:
        cards = _Cards.model_validate_json(body).data
    except ValidationError as error:
        raise BadAnswer(f"{url}/v1/models returned no valid list of models: {first_problem(error)}") from None
    return [
        ServedCard(
            id=card.id,
            root=card.root or card.id,
            context_length=card.max_model_len,
            fingerprint=card.topd.fingerprint if card.topd else None,
            eos_token_ids=None if card.topd is None or card.topd.eos_token_ids is None else tuple(card.topd.eos_token_ids),
        )
        for card in cards
    ]


def first_problem(error: ValidationError) -> str:
    """The first invalid value of pydantic's report, and its rule."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds unprintable characters")
    return text


_Name = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]


class _TopdCard(BaseModel):
    """Fields that only `topd serve` sends."""

    model_config = ConfigDict(strict=True)
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    eos_token_ids: list[Annotated[int, Field(ge=0, le=LARGEST)]] | None = Field(None, max_length=1000)


class _Card(BaseModel):
    model_config = ConfigDict(strict=True)
    id: Annotated[_Name, Field(min_length=1)]
    root: _Name | None = None
    max_model_len: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    topd: _TopdCard | None = None


class _Cards(BaseModel):
    model_config = ConfigDict(strict=True)
    data: list[_Card] = Field(max_length=10_000)
