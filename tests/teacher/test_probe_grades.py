"""A task that nobody can be graded right on is told at the start, with the example and the remedy."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import topd
from tests.e2e.tiny import tiny_config
from topd.report.health.checks import verdicts
from topd.report.stored import read_run
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams
from topd.tasks.grading import Grade, Grader, Rule
from topd.tasks.scorers import exact
from topd.tasks.task import Problem
from topd.teacher.probe_grades import FORMS, GRADED_PROMPTS, GRADED_TOKENS, check_gold, check_grades
from topd.teacher.teacher import Check
from topd.types import Prompt, Rollout, RolloutGroup

PARAMS = SamplingParams(n=1, max_tokens=100, temperature=0.7, top_p=0.9, seed=(3, "probe"))
ALMOST = 0.9999999
"""A grade that a sum of fractions may give for full marks."""


def prompt(i: int = 0, *, answer: str | None = "8", named: bool = True) -> Prompt:
    problem = Problem(question="5+3=", answer=answer, answer_is_named=named)
    return Prompt(id=f"train/{i}", text="", token_ids=(3,), answer=answer, problem=problem)


class Told(Grader):
    """Grades by a table of texts, others with 0; a text that begins with "?" gives no answer."""

    def __init__(self, table: Mapping[str, float]) -> None:
        self.table = table
        self.rule = Rule(score=exact)
        self.asked: list[tuple[str, Problem]] = []

    def grade(self, completions: object) -> list[Grade]:
        pairs = list(completions)
        self.asked += pairs
        return [Grade(grade=self.table.get(text, 0.0), extracted=None if text[:1] == "?" else text[-9:]) for text, _ in pairs]


class Says(EmbeddedEngine):
    """Completes every prompt with the given texts in turn; one that ends in "~" is cut off. Remembers how it was asked."""

    context_length, policy_version, tolerance, exact = None, 0, None, True

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, **told: Callable) -> list[RolloutGroup]:
        self.prompts, self.params = prompts, params
        texts = iter(self.texts * len(prompts) * params.n)

        def rollout() -> Rollout:
            text = next(texts)
            return Rollout(
                token_ids=(3,), logprobs=torch.zeros(1), finish_reason="length" if text[-1] == "~" else "stop", text=text
            )

        return [RolloutGroup(prompt=p, rollouts=tuple(rollout() for _ in range(params.n)), policy_version=0) for p in prompts]


def gold(grader: Grader, *prompts: Prompt) -> list[Check]:
    return list(check_gold(grader, prompts))


def grades(
    *models: Says, table: Mapping[str, float] = {"8": 1.0}, prompts: Sequence[Prompt] = (prompt(),), limit: int = 100
) -> list[Check]:
    engines = dict(zip(("student", "teacher", "other"), models, strict=False))
    params = SamplingParams(n=1, max_tokens=limit, temperature=0.7, top_p=0.9, seed=(3, "probe"))
    return list(check_grades(engines, Told(table), prompts, params))


# right answers


@pytest.mark.parametrize("grade", [1.0, ALMOST])
def test_right_answers_that_are_graded_right_pass_in_the_form_that_is_asked_for(grade: float) -> None:
    grader = Told({r"\boxed{8}": grade, "8": grade})
    [check] = gold(grader, prompt())
    assert check == Check(name="right answers", ok=True, detail=r"graded 1 in the form '\\boxed{...}'")
    assert [text for text, _ in grader.asked] == [form.format("8") for form in FORMS]
    assert all(problem.answer == "8" for _, problem in grader.asked)


def test_the_form_in_which_most_are_right_is_named() -> None:
    [check] = gold(Told({r"\boxed{8}": 1.0, "#### 8": 1.0, "#### 9": 1.0}), prompt(), prompt(1, answer="9"))
    assert (check.warning, check.detail) == (False, "graded 1 in the form '#### ...'")


@pytest.mark.parametrize("grade", [0.0, 0.99])
def test_right_answers_that_no_form_makes_right_are_counted_and_the_first_is_named(grade: float) -> None:
    right = {r"\boxed{7}": 1.0, "8": grade, r"\boxed{8}": grade}
    [check] = gold(Told(right), prompt(0, answer="7"), prompt(1), prompt(2, answer="9"))
    assert (check.name, check.ok, check.warning) == ("right answers", True, True)
    assert check.detail == (
        "2 of 3 right answers are not graded 1 in any usual form, the first is '8' of train/1: hardly any completion can be "
        "graded right. Check task.answer_pattern and task.grader. Try the rule on your own completions with `topd grade` "
        "(docs/data.md)."
    )


@pytest.mark.parametrize(
    "answer", ["1+1=2\n#### 2\n\nThanks", "The answer is 2.", '{"inputs": ["3"]}', '[{"input": "3"}]'], ids=range(4)
)
def test_right_answers_that_hold_more_than_an_answer_are_counted(answer: str) -> None:
    """As themselves they would be graded 1. Wherever they stand in the data."""
    prompts = [*(prompt(i) for i in range(GRADED_PROMPTS)), prompt(7, answer=answer)]
    table = {form.format(text): 1.0 for form in FORMS for text in ("8", answer)}
    [check] = gold(Told(table), *prompts)
    assert check.warning
    assert check.detail.startswith(f"1 of {len(prompts)} contain more than an answer")
    assert f"{answer!r} of train/7" in check.detail
    whole = Told(table)
    whole.rule = Rule(score=exact, whole_text=True)
    assert not gold(whole, *prompts)[0].warning


def test_nothing_is_said_of_right_answers_that_nobody_names() -> None:
    grader = Told({})
    assert gold(grader, prompt(answer=None), prompt(1, named=False)) == []
    assert grader.asked == []
    [check] = gold(grader, prompt(answer=None), prompt(1, named=False), *(prompt(i) for i in range(2, 20)))
    assert check.detail.startswith(f"{GRADED_PROMPTS} of {GRADED_PROMPTS} right answers are not graded 1")


# completions

NOTHING = (
    "No completion is graded right: the problems are too hard, or completions state their answers in another form. Request "
    r"\boxed{} with task.prompt_suffix, or set task.answer_pattern. Try the rule on your own completions with `topd grade` "
    "(docs/data.md)."
)
CUT = "Most are cut off before they end. Raise rollout.max_completion_tokens, or check the end token."


def test_completions_are_sampled_as_in_the_run_few_and_not_too_long() -> None:
    for limit in (100, GRADED_TOKENS, GRADED_TOKENS + 1):
        engine = Says("8")
        prompts = [prompt(answer=None), *(prompt(i) for i in range(1, 20))]
        grades(engine, prompts=prompts, limit=limit)
        assert engine.prompts == prompts[1 : GRADED_PROMPTS + 1]
        assert engine.params == SamplingParams(
            n=2, max_tokens=min(limit, GRADED_TOKENS), temperature=0.7, top_p=0.9, seed=(3, "probe")
        )


def test_each_completion_is_graded_against_its_own_problem() -> None:
    grader, prompts = Told({}), [prompt(0, answer="7"), prompt(1)]
    list(check_grades({"student": Says("a", "b", "c", "d")}, grader, prompts, PARAMS))
    assert [(text, problem.answer) for text, problem in grader.asked] == [("a", "7"), ("b", "7"), ("c", "8"), ("d", "8")]


def test_a_completion_is_graded_behind_the_thinking_that_its_prompt_opens() -> None:
    grader = Told({})
    list(check_grades({"student": Says("8")}, grader, [dataclasses.replace(prompt(), text="5+3=<think>\n")], PARAMS))
    assert {text for text, _ in grader.asked} == {"<think>8"}


def test_without_answers_nothing_is_sampled() -> None:
    assert grades(Says(), prompts=[prompt(answer=None)]) == []


@pytest.mark.parametrize("grade", [1.0, ALMOST])
def test_right_completions_are_counted_and_one_is_shown(grade: float) -> None:
    [check] = grades(Says("9", "8", "7~", "?"), table={"8": grade, "9": 0.99}, prompts=[prompt(), prompt(1)])
    assert check == Check(
        name="grades of the student",
        ok=True,
        detail="1 of 4 completions graded right, 1 cut off at 100 tokens. Example: it ends '8'; extracted '8', right answer '8'.",
    )


def test_nothing_right_is_warned_about() -> None:
    [check] = grades(Says("9"))
    assert (check.ok, check.warning) == (True, True)
    assert check.detail == (
        "0 of 2 completions graded right, 0 cut off at 100 tokens. Example: it ends '9'; extracted '9', right answer '8'. "
        + NOTHING
    )


def test_partial_marks_are_not_right() -> None:
    [check] = grades(Says("9"), table={"9": 0.5})
    assert check.warning
    assert check.detail.startswith("0 of 2 completions graded right")


@pytest.mark.parametrize(
    ("student", "teacher", "warned"),
    [
        (("9",), ("8",), (False, False)),  # the teacher shows that the problems can be solved
        (("9", "?"), ("8",), (True, False)),  # half of the student's give no answer
        (("9", "9", "9", "?"), ("9", "8", "9", "9"), (False, False)),
        (("?",), ("8",), (True, False)),
        (("9",), ("9",), (True, True)),
        (("8",), ("9",), (False, True)),  # a teacher that is always wrong is told, whoever else is right
    ],
)
def test_a_student_that_is_always_wrong_is_warned_about_unless_the_teacher_is_not(
    student: Sequence[str], teacher: Sequence[str], warned: tuple[bool, bool]
) -> None:
    checks = grades(Says(*student), Says(*teacher), prompts=[prompt(), prompt(1)])
    assert [check.name for check in checks] == ["grades of the student", "grades of the teacher"]
    assert tuple(check.warning for check in checks) == warned
    assert [check.detail.endswith(NOTHING) for check in checks] == list(warned)


def test_any_later_model_that_is_right_is_enough() -> None:
    assert [check.warning for check in grades(Says("9"), Says("9"), Says("8"))] == [False, False, False]


@pytest.mark.parametrize(
    ("texts", "limit", "ends"),
    [
        (("9~",), 100, CUT),
        (("8", "9~", "9~", "9~"), 100, CUT),  # that one is right is no comfort
        (("9~",), GRADED_TOKENS, CUT),
        (("9~",), GRADED_TOKENS + 1, f"The run's limit is {GRADED_TOKENS + 1}, so this says little."),
        (("9", "9~"), 100, NOTHING),  # half is not most
        (("9", "9~"), GRADED_TOKENS + 1, NOTHING),
        (("8", "9~"), GRADED_TOKENS + 1, "right answer '8'."),
    ],
)
def test_completions_that_are_cut_off_are_told_from_wrong_ones(texts: Sequence[str], limit: int, ends: str) -> None:
    [check] = grades(Says(*texts), limit=limit, prompts=[prompt(), prompt(1)])
    assert check.detail.endswith(f" {ends}")
    assert check.warning == (ends in (CUT, NOTHING))
    assert [words for words in (CUT, NOTHING, "says little") if words in check.detail] == [
        words for words in (CUT, NOTHING, "says little") if words in ends
    ]
    assert f" cut off at {min(limit, GRADED_TOKENS)} tokens. " in check.detail


LONG = "x" * 100 + "y" * 150 + "8888888888"


@pytest.mark.parametrize(
    ("texts", "table", "shown"),
    [
        (("7", "8", "9", "?"), {"8": 1.0, "7": 0.5}, "Example: it ends '8'; extracted '8', right answer '8'."),
        (("?", "?~", "5~", "?"), {}, "Example: it ends '5~'; extracted '5~', right answer '8'."),
        (("?~", "?1~", "?2", "?3"), {}, "Example: it ends '?2'; extracted None, right answer '8'."),
        (("9~", "?", "7", "?"), {}, "Example: it ends '7'; extracted '7', right answer '8'."),
        ((LONG,), {}, f"Example: it ends {'...' + 'y' * 150 + '8888888888'!r}; extracted '888888888', right answer '8'."),
        ((LONG[-160:],), {}, f"Example: it ends {LONG[-160:]!r}; extracted '888888888', right answer '8'."),
    ],
)
def test_the_example_is_the_best_completion_by_grade_then_answer_then_end(
    texts: Sequence[str], table: Mapping[str, float], shown: str
) -> None:
    [check] = grades(Says(*texts), table=table, prompts=[prompt(), prompt(1)])
    assert f" tokens. {shown}" in check.detail


def test_the_right_answer_beside_the_example_is_that_of_its_problem() -> None:
    [check] = grades(Says("?", "?", "8", "?"), prompts=[prompt(0, answer="7"), prompt(1)])
    assert "Example: it ends '8'; extracted '8', right answer '8'." in check.detail


# in a run


def test_what_the_probe_warned_of_is_shown_at_the_start_kept_and_repeated_by_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern takes the answer of no completion of this task, nor the right answer itself. The steps are left out."""
    monkeypatch.setattr("topd.loop.Run.to_the_end", lambda self: {})
    topd.train(tiny_config(tmp_path / "run", task__eval_path=None, task__answer_pattern="(never)"))
    stored = json.loads((tmp_path / "run/probe.json").read_text())["checks"]
    warned = {check["name"]: check["detail"] for check in stored if check["warning"]}
    assert list(warned) == ["right answers", "grades of the student", "grades of the teacher"]
    assert warned["right answers"].startswith("8 of 8 right answers are not graded 1 in any usual form")
    assert warned["grades of the student"].startswith("0 of 16 completions graded right, ")
    shown = " ".join(capsys.readouterr().out.split())
    verdict = {one.title: one for one in verdicts(read_run(tmp_path / "run"))}
    for name, detail in warned.items():
        assert " ".join(f"WARNING {name}: {detail}".split()) in shown
        judged = verdict[f"The probe warned: {name}"]
        assert (judged.level, judged.words) == ("warning", detail)
    assert not any(
        title.startswith("The probe warned") for title in set(verdict) - {f"The probe warned: {name}" for name in warned}
    )
