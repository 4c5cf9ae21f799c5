"""Ragged data in one form: numbers per token or per completion, flat, with lengths. They are cut and joined here."""

import itertools
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Completions `start` to `stop` of group number `group`."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Named streams over groups of completions, without padding.

    lengths = [3, 2]; group_sizes = [2]; every stream in `tokens` holds 5 numbers, every one in `rollouts` 2
    """

    lengths: Int[Tensor, " rollout"]
    group_sizes: Int[Tensor, " group"]
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Streams with one entry per token: [token, ...]."""
    rollouts: Mapping[str, Tensor] = field(default_factory=dict)
    """Streams with one entry per completion: [rollout, ...]."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sized]]) -> "Ragged":
        """The lengths of some groups of completions, without streams."""
        lengths = torch.tensor([len(completion) for group in groups for completion in group], dtype=torch.long)
        return cls(lengths=lengths, group_sizes=torch.tensor([len(group) for group in groups], dtype=torch.long))

    @classmethod
    def join(cls, parts: "Sequence[Ragged]") -> "Ragged":
        """The groups of all parts, in order, with the streams that all of them have."""
        common = [name for name in parts[0].tokens if all(name in part.tokens for part in parts)]
        graded = [name for name in parts[0].rollouts if all(name in part.rollouts for part in parts)]
        return cls(
            lengths=torch.cat([part.lengths for part in parts]),
            group_sizes=torch.cat([part.group_sizes for part in parts]),
            tokens={name: torch.cat([part.tokens[name] for part in parts]) for name in common},
            rollouts={name: torch.cat([part.rollouts[name] for part in parts]) for name in graded},
        )

    def __getitem__(self, name: str) -> Tensor:
        """A stream by name. Raises KeyError if there is none."""
        return self.tokens[name] if name in self.tokens else self.rollouts[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.rollouts

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a Ragged has streams, not items")

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens_per_group(self) -> Int[Tensor, " group"]:
        return torch.stack([part.sum() for part in self.lengths.split(self.group_sizes.tolist())])

    def adding(self, **tokens: Tensor) -> "Ragged":
        """The same with more streams per token."""
        return replace(self, tokens={**self.tokens, **tokens})

    def to(self, device: torch.device) -> "Ragged":
        """The same with its streams on `device`. Lengths stay on the CPU."""
        tokens = {name: stream.to(device) for name, stream in self.tokens.items()}
        return replace(self, tokens=tokens, rollouts={name: stream.to(device) for name, stream in self.rollouts.items()})

    def by_rollout(self, name: str) -> tuple[Tensor, ...]:
        """A stream per token, cut into completions."""
        return self.tokens[name].split(self.lengths.tolist())

    def by_group(self, name: str) -> tuple[Tensor, ...]:
        """A stream per token, cut into groups."""
        return self.tokens[name].split(self.tokens_per_group.tolist())

    def take(self, groups: Sequence[int]) -> "Ragged":
        """Some of the groups, in that order."""
        sizes = self.group_sizes.tolist()
        return self.cut([Rows(group, 0, sizes[group]) for group in groups])

    def cut(self, pieces: Sequence[Rows]) -> "Ragged":
        """Some of the completions; every piece becomes a group."""
        rows, places = self._rows_of(pieces), self.places(pieces)
        return Ragged(
            lengths=self.lengths[rows],
            group_sizes=torch.tensor([piece.stop - piece.start for piece in pieces], dtype=torch.long),
            tokens={name: stream[places] for name, stream in self.tokens.items()},
            rollouts={name: stream[rows] for name, stream in self.rollouts.items()},
        )

    def places(self, pieces: Sequence[Rows]) -> Int[Tensor, " token"]:
        """Positions of the tokens of these completions in a stream."""
        ends = [0, *self.lengths.cumsum(0).tolist()]
        return torch.cat([torch.arange(ends[first], ends[last]) for first, last in self._spans(pieces)])

    def _rows_of(self, pieces: Sequence[Rows]) -> Tensor:
        return torch.cat([torch.arange(first, last) for first, last in self._spans(pieces)])

    def _spans(self, pieces: Sequence[Rows]) -> Iterator[tuple[int, int]]:
        firsts = [0, *itertools.accumulate(self.group_sizes.tolist())]
        for piece in pieces:
            yield firsts[piece.group] + piece.start, firsts[piece.group] + piece.stop
