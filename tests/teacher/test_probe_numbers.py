"""Servers that answer with the right ids and the wrong numbers, the same at every time: the probe must see each."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import served_config, shorten_pauses
from tests.fakes import make_model, ragged_groups
from tests.serve.serving import serving
from topd import config_file
from topd.assemble import assemble
from topd.endpoint.background import Background
from topd.models.load import BUILTIN, load
from topd.models.logprobs import Tokens, score_groups
from topd.teacher import probe_numbers as module
from topd.teacher.local import LocalTeacher
from topd.teacher.probe_numbers import check_numbers, continuations
from topd.teacher.probe_weights import check_weights, weights_at_hand
from topd.teacher.served import Config, EndpointTeacher

GROUPS = ragged_groups((4, (7, 2, 5)), (9, (6,)))
DIGITS = [Tokens((3, 4, 5), ((6, 7, 8), (4, 4))), Tokens((5, 9), ((9, 3),))]
"""For the shipped pair, which has fewer tokens."""


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3-untied", seed=3)


@pytest.fixture(scope="module")
def base():
    with serving(name="m") as base:
        yield base


@pytest.fixture(scope="module")
def student():
    return load("builtin:tiny-student", dtype="float32", device=torch.device("cpu"), role="student")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


def probing(url, student, *, temperature=1.0):
    background = Background()
    try:
        config = Config(name="m", base_url=[url], timeout_s=5.0, patience_s=5.0, max_attempts=2)
        settings = {"role": "teacher", "student": student, "temperature": temperature, "cache": None}
        teacher = EndpointTeacher(config, background, **settings)
        return {check.name: check for check in check_numbers(teacher, student, DIGITS)}
    finally:
        background.close()


def all_rows(change):
    """A server that changes its numbers so, row by row. A first position without a number keeps none."""

    def edit(rows):
        for row in rows:
            numbers = [entry[1] for entry in row if entry[1] is not None]
            changed = iter(change(numbers))
            for entry in row:
                entry[1] = None if entry[1] is None else next(changed)

    lie = faults.edited("lie", edit)

    async def fault(exchange):
        """Routes that the dialect does not have stay absent."""
        hidden = getattr(exchange.proxy.dialect, "hidden", {})
        absent = exchange.request.path in hidden or (
            exchange.request.kind == "score"
            and exchange.proxy.dialect.__class__ is faults.Echo
            and "echo" not in exchange.request.json
        )
        return await (exchange.forward() if absent else lie(exchange))

    return faults.named("lie", fault)


LIES = {
    "left": (lambda numbers: [*numbers[1:], -1.5], "teacher prefixes"),
    "right": (lambda numbers: [-1.5, *numbers[:-1]], "teacher probabilities"),
    "right with the first kept": (lambda numbers: [numbers[0], *numbers[:-1]], "teacher prefixes"),
    "zeros": (lambda numbers: [0.0] * len(numbers), "teacher probabilities"),
    "log10": (lambda numbers: [x / math.log(10) for x in numbers], "teacher probabilities"),
    "log2": (lambda numbers: [x / math.log(2) for x in numbers], "teacher probabilities"),
    "higher": (lambda numbers: [min(0.0, x + 0.2) for x in numbers], "teacher probabilities"),
    "lower": (lambda numbers: [x - 0.2 for x in numbers], "teacher probabilities"),
}
"""Name -> (change of a row, check that fails)."""


@pytest.mark.parametrize("dialect", faults.DIALECTS)
def test_an_honest_server_passes_in_every_dialect_and_each_lie_is_seen(base, student, dialect, monkeypatch):
    monkeypatch.setattr(module, "CONTEXTS", 2)
    with proxying(base, dialect) as proxy:
        assert all(check.ok and not check.warning for check in probing(proxy.url, student).values())
        for name, (change, failing) in LIES.items():
            if name == "right with the first kept" and dialect in ("vllm", "echo"):
                failing = "teacher probabilities"  # rows begin at the prompt there: the first kept is the prompt's
            proxy.give(faults.always(all_rows(change)))
            found = probing(proxy.url, student)
            assert not found[failing].ok, (name, found)


@pytest.mark.parametrize(("applied", "fails"), [(None, False), (1.0, True), (1.0 / 0.7, True)])
def test_a_temperature_that_is_not_applied_as_asked_is_seen(base, student, applied, fails):
    """At 0.7. `applied`: whatever is asked for."""

    async def at_another(exchange):
        asked = {**exchange.request.json, **({"temperature": applied} if applied else {})}
        return await exchange.proxy.ask(dataclasses.replace(exchange.request, body=json.dumps(asked).encode()))

    with proxying(base) as proxy:
        proxy.give(faults.always(at_another))
        found = probing(proxy.url, student, temperature=0.7)
    assert found["teacher temperature"].ok is not fails
    assert found["teacher prefixes"].ok
    assert found["teacher probabilities"].ok
    assert ("log-probs are at 0.7" in found["teacher temperature"].detail) is not fails


def test_a_server_that_cannot_be_asked_fails_with_its_words(base, student):
    with proxying(base) as proxy:
        proxy.give(lambda number: faults.status(400) if number else None)
        found = probing(proxy.url, student)
    assert not found["teacher numbers"].ok
    assert "answered 400" in found["teacher numbers"].detail


def test_places_range_from_the_surest_to_the_least_sure_with_the_likeliest_tokens_first(model):
    spread = []
    for place in continuations(model, GROUPS):
        assert sorted(token for (token,) in place.completions) == list(range(model.vocab_size))
        numbers = torch.cat(score_groups(model, [place], max_tokens=4096)[0])
        torch.testing.assert_close(numbers, numbers.sort(descending=True).values)
        spread.append(float(-(numbers.exp() * numbers).sum()))
    assert len(spread) == module.CONTEXTS
    assert spread == sorted(spread)
    assert spread[-1] > 1.1 * spread[0]


def test_a_long_context_is_cut_at_its_beginning(model, monkeypatch):
    monkeypatch.setattr(module, "CONTEXT_TOKENS", 6)
    [group] = ragged_groups((9, (1,)))
    assert [place.prompt_ids for place in continuations(model, [group])] == [group.prompt_ids[-6:]]


class Changed(LocalTeacher):
    """Adds `offset` to all log-probs."""

    def log_probs(self, groups, *, temperature=None):
        return [tuple(part + self.offset for part in parts) for parts in super().log_probs(groups, temperature=temperature)]


@pytest.mark.parametrize(("offset", "ok", "warning"), [(0.0, True, False), (0.2, False, False), (-0.2, True, True)])
def test_of_a_large_vocabulary_the_likeliest_tokens_have_nearly_all_probability_and_no_more(monkeypatch, offset, ok, warning):
    """The student's own numbers, at places where it is sure enough; 20 of 40 tokens."""
    monkeypatch.setattr(module, "CONTINUATIONS", 20)
    model = make_model("qwen3-untied", seed=3)
    with torch.no_grad():
        model.module.lm_head.weight.mul_(4)
    teacher = Changed(model, temperature=1.0, max_tokens=4096)
    teacher.offset = offset
    check = {check.name: check for check in check_numbers(teacher, model, GROUPS)}["teacher probabilities"]
    assert (check.ok, check.warning) == (ok, warning), check.detail


@pytest.mark.parametrize(("vocab_size", "ok"), [(4, False), (1000, True)])
def test_a_sure_teacher_with_an_offset_that_ends_at_zero_is_seen(vocab_size, ok):
    """Its sums are 1 to within a thousandth. Of a part of a vocabulary it is a warning: a softmax in bfloat16 does the same."""
    right = torch.tensor([[0.9994, 0.0003, 0.0002, 0.0001], [0.999, 0.0004, 0.0003, 0.0003]]).log()
    noise = torch.tensor([[0.0, 0.1, -0.1, 0.1], [0.00005, 0.1, 0.1, -0.1]])
    for honest in (right, right + noise, right - noise):
        check = module._check_probabilities(honest, vocab_size=vocab_size)
        assert (check.ok, check.warning) == (True, False)
    check = module._check_probabilities((right + 0.2).clamp(max=0.0), vocab_size=vocab_size)
    assert (check.ok, check.warning) == (ok, True)
    assert "the probabilities sum to more than 1: the excess is" in check.detail


def test_a_teacher_that_knows_nothing_is_no_liar():
    """All tokens equally likely: one number, and the right one."""
    model = make_model("qwen3-untied", seed=3)
    with torch.no_grad():
        model.module.lm_head.weight.zero_()
    student = make_model(seed=5)
    assert all(check.ok for check in check_numbers(LocalTeacher(model, temperature=1.0, max_tokens=4096), student, GROUPS))


def test_a_served_teacher_is_compared_with_its_weights_where_they_are_at_hand(tmp_path: Path):
    """An offset too small for anything else, and a model that is none of the named ones."""

    def comparing(url, **changes):
        parts = assemble(config_file.load(served_config(tmp_path, url, **changes)))
        try:
            return check_weights(parts.teacher, parts.student, DIGITS), weights_at_hand(parts.teacher, parts.student)
        finally:
            parts.close()

    with serving() as base, serving("builtin:tiny-student", name="teacher") as other, proxying(base, "vllm") as proxy:
        right, (key, source) = comparing(base)
        assert (right.ok, key, source) == (True, "teacher.name", "builtin:tiny-teacher")
        assert "on rollouts" in right.detail
        proxy.give(faults.always(all_rows(lambda numbers: [x - 0.2 for x in numbers])))
        assert not comparing(proxy.url)[0].ok
        absent, _ = comparing(other, teacher__name="teacher")
        assert (absent.ok, absent.warning, absent.unproven) == (True, True, True)
        assert "log-probs equal the student's" in absent.detail
        assert "not available, so it is not proven which model answers" in absent.detail
        taken, (key, _) = comparing(other, teacher__name="teacher", teacher__tokenizer=str(BUILTIN / "tiny-teacher"))
        assert (taken.ok, key) == (False, "teacher.tokenizer")
        lent, _ = comparing(other, teacher__name="teacher", teacher__tokenizer=str(BUILTIN / "tiny-student"))
        assert "not available" in lent.detail
    with serving(name="teacher") as base:
        absent, _ = comparing(base, teacher__name="teacher")
        assert (absent.ok, absent.warning, absent.unproven) == (True, False, True)
