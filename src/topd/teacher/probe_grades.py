"""Checks that completions of this pair on this task can be graded, on a few samples before any training."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from topd.rollout.engine import Engine, SamplingParams
from topd.tasks.answers import in_context
from topd.tasks.grading import FULL_MARKS, Grade, Grader
from topd.teacher.teacher import Check
from topd.types import Prompt, Rollout

GRADED_PROMPTS, GRADED_ROLLOUTS, GRADED_TOKENS = 8, 2, 1024
"""Prompts, completions per prompt, and largest completion length sampled from each model."""

FORMS = ("\\boxed{{{}}}", "{}", "The answer is {}.", "Answer: {}", "#### {}", "<answer>{}</answer>", "So it is:\n{}")
"""Forms in which a completion may state its answer; the first is the recommended one."""

WORDY = re.compile(r"\S\s*\n\s*\S|^\s*(?:\{\s*\"|\[\s*\{)|\banswer is\b", re.IGNORECASE)
"""Reference answers that cannot equal the final answer of a completion."""

READ_ON = "Try the rule on your own completions with `topd grade` (docs/data.md)."
SHOWN = 160
"""Characters printed of an example's end."""


def check_gold(grader: Grader, prompts: Sequence[Prompt]) -> Iterator[Check]:
    """The right answer itself, in one of the usual forms, must be graded 1. No check without known answers."""
    named = [prompt for prompt in prompts if prompt.answer is not None and prompt.problem.answer_is_named]
    asked = named[:GRADED_PROMPTS]
    if not asked:
        return
    pairs = [(form.format(prompt.answer), prompt.problem) for form in FORMS for prompt in asked]
    grades = [grade.grade for grade in grader.grade(pairs)]
    per_form = [grades[i : i + len(asked)] for i in range(0, len(grades), len(asked))]
    best = max(range(len(FORMS)), key=lambda i: sum(per_form[i]))
    wrong = [prompt for prompt, grade in zip(asked, per_form[best], strict=True) if grade < FULL_MARKS]
    wordy = [] if grader.rule.whole_text else [prompt for prompt in named if WORDY.search(prompt.answer or "")]
    if not wrong and wordy:
        yield Check(
            name="right answers",
            ok=True,
            warning=True,
            detail=f"{len(wordy)} of {len(named)} contain more than an answer (several lines, JSON or `answer is`), the first is "
            f"{wordy[0].answer!r:.80} of {wordy[0].id}: completions state less and get 0. Store the bare answer. {READ_ON}",
        )
        return
    if not wrong:
        yield Check(name="right answers", ok=True, detail=f"graded 1 in the form {FORMS[best].format('...')!r}")
        return
    yield Check(
        name="right answers",
        ok=True,
        warning=True,
        detail=f"{len(wrong)} of {len(asked)} right answers are not graded 1 in any usual form, the first is "
        f"{wrong[0].answer!r:.80} of {wrong[0].id}: hardly any completion can be graded right. Check task.answer_pattern "
        f"and task.grader. {READ_ON}",
    )


def check_grades(
    engines: Mapping[str, Engine], grader: Grader, prompts: Sequence[Prompt], params: SamplingParams
) -> Iterator[Check]:
    """Sample and grade a few completions of each model, with one example. No check without known answers.

    `engines` by the name of the model, weakest first: a model with no right answers gives no warning if a later one has some,
    unless it states no answers. `params` are those of the run's rollouts; at most GRADED_TOKENS of each are sampled.
    """
    asked = [prompt for prompt in prompts if prompt.answer is not None][:GRADED_PROMPTS]
    limit = params.max_tokens
    params = dataclasses.replace(params, n=GRADED_ROLLOUTS, max_tokens=min(limit, GRADED_TOKENS))
    others_right = False
    checks = []
    for who, engine in reversed(list(engines.items())) if asked else ():
        pairs = [(group.prompt, rollout) for group in engine.generate(asked, params) for rollout in group.rollouts]
        grades = grader.grade((in_context(prompt.text, rollout.text), prompt.problem) for prompt, rollout in pairs)
        right = sum(grade.grade >= FULL_MARKS for grade in grades)
        answers = sum(grade.extracted is not None for grade in grades)
        cut = sum(rollout.finish_reason == "length" for _, rollout in pairs)
        detail = f"{right} of {len(pairs)} completions graded right, {cut} cut off at {params.max_tokens} tokens. "
        detail += _example(pairs, grades)
        mostly_cut = 2 * cut > len(pairs)
        remedies = []
        if mostly_cut and limit > GRADED_TOKENS:
            detail += f" The run's limit is {limit}, so this says little."
        elif mostly_cut:
            remedies.append("Most are cut off before they end. Raise rollout.max_completion_tokens, or check the end token.")
        if not right and not mostly_cut and not (others_right and 2 * answers > len(pairs)):
            remedies.append(
                "No completion is graded right: the problems are too hard, or completions state their answers in another form. "
                f"Request \\boxed{{}} with task.prompt_suffix, or set task.answer_pattern. {READ_ON}"
            )
        checks.append(Check(name=f"grades of the {who}", ok=True, warning=bool(remedies), detail=" ".join([detail, *remedies])))
        others_right = others_right or right > 0
    yield from reversed(checks)


def _example(pairs: Sequence[tuple[Prompt, Rollout]], grades: Sequence[Grade]) -> str:
    """Sentence about one completion: a right one if there is any, else one with an answer, else one that ended."""

    def rank(i: int) -> tuple[float, bool, bool]:
        return grades[i].grade, grades[i].extracted is not None, pairs[i][1].finish_reason == "stop"

    best = max(range(len(pairs)), key=rank)
    prompt, rollout = pairs[best]
    end = rollout.text if len(rollout.text) <= SHOWN else "..." + rollout.text[-SHOWN:]
    return f"Example: it ends {end!r}; extracted {grades[best].extracted!r:.80}, right answer {prompt.answer!r:.80}."
