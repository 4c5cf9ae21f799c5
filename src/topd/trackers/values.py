"""What trackers are given: rows of the run folder -> named numbers, and a table. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """A small table, row by row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def row_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, under the same names; what is null is left out."""
    return {name: value for name, value in row.items() if _is_number(value)}


def evaluation_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of evals.jsonl: eval/BENCHMARK/MODEL/avg_at_k, .../ci95_low, .../ci95_high, .../pass_at_8 ..."""
    return {f"eval/{row['benchmark']}/{row['model']}/{name}": value for name, value in _measured(row).items()}


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if name != "step" and _is_number(value)}
    numbers |= _interval("", row["ci95"])
    for k, found in row["pass_at"].items():
        numbers |= {f"pass_at_{k}": found["value"]} | _interval(f"pass_at_{k}_", found["ci95"])
    return numbers


def _interval(prefix: str, ends: list[float]) -> dict[str, float]:
    return {f"{prefix}ci95_low": ends[0], f"{prefix}ci95_high": ends[1]}


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """final/BENCHMARK/WHO/avg_at_k and its interval for base, student and teacher; final/steps, final/tokens, ..."""
    numbers = {f"final/{name}": value for name, value in summary.items() if _is_number(value)}
    for benchmark, who, row in _results(summary):
        found = {"avg_at_k": row["avg_at_k"]} | _interval("", row["ci95"])
        numbers |= {f"final/{benchmark}/{who}/{name}": value for name, value in found.items()}
    return numbers


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Base, student and teacher on every benchmark."""
    return Table(
        columns=("benchmark", "model", "problems", "k", "avg_at_k", "ci95_low", "ci95_high"),
        rows=tuple(
            (benchmark, who, row["problems"], row["k"], row["avg_at_k"], *row["ci95"])
            for benchmark, who, row in _results(summary)
        ),
    )


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    three = ("base", "student", "teacher")
    return [(name, who, found[who]) for name, found in summary["benchmarks"].items() for who in three if found[who]]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables -> dotted keys, as they are written on the command line."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
