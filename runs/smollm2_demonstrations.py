"""Worked solutions for the SmolLM2 teacher: chain_sum problems of reasoning-gym, solved one operation at a time.

    python runs/smollm2_demonstrations.py runs/smollm2/demonstrations.jsonl [--size 8000]

    question  "State the final answer to the following arithmetic problem: 15 - 43 - 75 ="
    solution  "15 - 43 = -28\n-28 - 75 = -103\nThe answer is -103"

The seeds are those of no other set. Small sums repeat all the same; `topd train` leaves out the questions that a benchmark asks.
"""

import argparse
import json
from pathlib import Path

import reasoning_gym

FIRST_SEED = 500_000_000
PARAMS = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}


def worked(expression: str) -> str:
    """The running total, one operation a line."""
    first, *rest = expression.split()
    total, lines = int(first), []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if operator == "+" else total - int(number)
        lines.append(f"{total} {operator} {number} = {result}")
        total = result
    return "\n".join([*lines, f"The answer is {total}"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("path", type=Path)
    arguments.add_argument("--size", type=int, default=8000)
    options = arguments.parse_args()
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with options.path.open("w", encoding="utf-8") as file:
        for item in reasoning_gym.create_dataset("chain_sum", size=options.size, seed=FIRST_SEED, **PARAMS):
            solution = worked(item["metadata"]["expression"])
            assert solution.endswith(f" {item['answer']}"), item
            row = {"prompt": item["question"], "answer": item["answer"], "demonstration": solution}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
