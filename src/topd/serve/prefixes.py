"""Rows of token ids that begin alike, as groups, so that what they share is run once."""

from collections.abc import Sequence
from dataclasses import dataclass

from topd.models.logprobs import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Rows as groups of a shared prompt and tails. Every token of a row but its first is in a completion of some group.

    For the rows (1, 2, 3, 4), (1, 2, 3, 5): groups = Tokens((1,), ((2, 3),)), Tokens((1, 2, 3), ((4,), (5,)));
    parts = ((0, 0), (1, 0)), ((0, 0), (1, 1))
    """

    groups: tuple[Tokens, ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    """For every row the (group, completion) pairs that hold it from its second token on, in order."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Rows number `rows`, of `num_tokens` in all, that share their first `common` tokens."""

    rows: tuple[int, ...]
    common: int
    num_tokens: int

    @property
    def cost(self) -> int:
        """Tokens to run: the prefix twice (once to score it, once for the tails to read), then the tails."""
        return self.num_tokens - max(0, len(self.rows) - 2) * self.common


def share_prefixes(rows: Sequence[tuple[int, ...]]) -> SharedPrefixes:
    """Group rows while that does not make more tokens to run. Rows must have a token; one of a single token has no parts."""
    groups: list[Tokens] = []
    parts: list[tuple[tuple[int, int], ...]] = [()] * len(rows)
    for cluster in _clusters(rows):
        prefix = rows[cluster.rows[0]][: cluster.common]
        shared: tuple[tuple[int, int], ...] = ()
        if len(prefix) > 1:
            shared = ((len(groups), 0),)
            groups.append(Tokens(prefix[:1], (prefix[1:],)))
        tails = {row[cluster.common :]: None for i in cluster.rows if len(row := rows[i]) > cluster.common}
        numbers = {tail: number for number, tail in enumerate(tails)}
        for i in cluster.rows:
            number = numbers.get(rows[i][cluster.common :])
            parts[i] = shared if number is None else (*shared, (len(groups), number))
        if tails:
            groups.append(Tokens(prefix, tuple(tails)))
    return SharedPrefixes(groups=tuple(groups), parts=tuple(parts))


def _clusters(rows: Sequence[tuple[int, ...]]) -> list[_Cluster]:
    """Rows in sorted order, each joining the cluster before it or opening one."""
    clusters: list[_Cluster] = []
    for i in sorted(range(len(rows)), key=rows.__getitem__):
        alone = _Cluster((i,), len(rows[i]), len(rows[i]))
        if clusters:
            last = clusters[-1]
            common = _num_common(rows[last.rows[0]][: last.common], rows[i])
            joined = _Cluster((*last.rows, i), common, last.num_tokens + alone.num_tokens)
            if common and joined.cost <= last.cost + alone.cost:
                clusters[-1] = joined
                continue
        clusters.append(alone)
    return clusters


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Number of first tokens that two rows share."""
    differing = (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
