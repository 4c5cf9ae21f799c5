"""Chaos: random kills, damaged files, lying servers, hostile input; how many end right, refused, or wrong without a word.

    python -m benchmarks.chaos kills --count 100 --folder /tmp/chaos
    python -m benchmarks.chaos all --seed 1 --folder /tmp/chaos

Run it from the repository's root. Every case is chosen by its seed and number alone, and its outcome is kept in the folder's
journal.jsonl: the same command goes on where it was stopped. One case again: --only 17, in a new folder. Exit 1 if anything was
silent or crashed, or a killed run was not resumed.
"""

import argparse
import os
from pathlib import Path

from benchmarks.chaos import damage, inputs, kills, liars
from benchmarks.chaos.cases import BAD, Journal

KINDS = {"kills": (kills.play, 100), "damage": (damage.play, 300), "liars": (liars.play, 10_000), "inputs": (inputs.play, 300)}
"""With the usual number of cases; of lying servers, all there are."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--folder", type=Path, required=True, help="for runs and journal, outside the repository")
    parser.add_argument("--only", help="the number of one case")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    journal = Journal(folder / "journal.jsonl", only=arguments.only)
    os.chdir(folder)  # what a command writes where it is started
    try:
        for name in KINDS if arguments.kind == "all" else [arguments.kind]:
            play, usual = KINDS[name]
            play(journal, folder / name, arguments.seed, usual if arguments.count is None else arguments.count)
    finally:
        print(f"\n{journal.table()}\n\n{sum(outcome.signals for outcome in journal.outcomes)} signals")
    bad = [o for o in journal.outcomes if o.verdict in BAD or (o.signals and o.verdict != "exact")]
    for outcome in bad:
        print(f"\n{outcome.case}: {outcome.verdict.upper()}: {outcome.row}: {outcome.words}")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
