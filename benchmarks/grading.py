"""Seconds that grading takes: 4,096 completions of 512 prompts, and the same with one hostile answer in a hundred.

    python benchmarks/grading.py [--completions 4096] [--workers N]

Answers are whole numbers, fractions and formulas in equal parts, a third of them right. Docs: docs/data.md, "Grading".
"""

import argparse
import random
import time
from contextlib import closing

from topd.tasks.grading import Grader, Rule
from topd.tasks.scorers import math_verify
from topd.tasks.task import Problem

HOSTILE = (r"10^{10^{10}}", r"7^{7^{9}}", r"(10^{8})!", r"2^{10^{9}}")


def answer(number: int) -> str:
    return (str(number), rf"\frac{{{number}}}{{7}}", rf"x^2+{number}")[number % 3]


def completions(size: int, hostile_share: float, seed: int) -> list[tuple[str, Problem]]:
    draw = random.Random(seed)
    rows = []
    for i in range(size):
        gold = i // 8
        stated = answer(draw.choice([gold, gold + 3, gold + 6]))
        if draw.random() < hostile_share:
            stated = draw.choice(HOSTILE)
        rows.append(
            (rf"First \boxed{{{i}}}, then we see that it is \boxed{{{stated}}}.", Problem(question="", answer=answer(gold)))
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for share in (0.0, 0.01):
        for repeat in range(options.repeats):
            rows = completions(options.completions, share, seed=repeat)
            with closing(Grader(Rule(score=math_verify), workers=options.workers)) as grader:
                began = time.perf_counter()
                grades = grader.grade(rows)
                seconds = time.perf_counter() - began
            right = sum(grade.grade for grade in grades) / len(grades)
            errors = sum(grade.error is not None for grade in grades)
            print(
                f"hostile {share:.0%}  {seconds:6.1f} s  {len(rows) / seconds:6.0f} a second  right {right:.1%}  errors {errors}"
            )


if __name__ == "__main__":
    main()
