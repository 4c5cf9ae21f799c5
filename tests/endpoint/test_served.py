"""Servers of one model: met by name, asked in the form they speak, and recognised by every answer."""

import asyncio
import functools
import itertools
import json
import threading
import time

import httpx2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.endpoint import proxy as faults
from tests.endpoint.clock import Clock
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import section, shorten_pauses
from tests.fakes import EOS, PAD, make_model, ragged_groups
from tests.serve.serving import serving
from topd.endpoint import served as module
from topd.endpoint.faults import Busy, Fault, OtherModel, Refused, Unavailable
from topd.endpoint.replica import Replica
from topd.endpoint.served import CANARY_TOLERANCE, ServedModel
from topd.errors import ConfigError
from topd.models.logprobs import score_groups
from topd.models.proof import CANARY_TOKENS, make_canary

GROUP = ragged_groups((4, (7, 2, 5)))[0]
NOWHERE = "http://127.0.0.1:9/v1"
KEY = "TOPD_TEST_KEY"


@pytest.fixture(scope="module")
def right():
    """(base URL, model)"""
    model = make_model(seed=0)
    with serving(model, name="m") as base:
        yield base, model


@pytest.fixture(scope="module")
def wrong():
    """The base URL of another model under the same name."""
    with serving(make_model(seed=1), name="m") as base:
        yield base


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


def served_by(*urls, tokenizer, name="m", verify=None, **options):
    servers = section(*urls, api_key_env=KEY, **options)
    return ServedModel(servers, role="teacher", name=name, canary=make_canary(tokenizer), verify=verify)


def meeting(served, then=None):
    """Connect, and what `then` makes of it."""

    async def meet():
        try:
            await served.connect()
            return await then(served) if then else served
        finally:
            await served.close()

    return asyncio.run(meet())


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.02)


def refusal(served, **options):
    with pytest.raises(ConfigError) as caught:
        meeting(served, **options)
    return str(caught.value)


def expected(model):
    return torch.cat(score_groups(model, [GROUP], max_tokens=4096)[0])


def test_the_canary_is_fixed_and_made_of_ordinary_tokens(tokenizer):
    canary = make_canary(tokenizer)
    assert canary == make_canary(tokenizer)
    assert len(canary.completions[0]) == CANARY_TOKENS
    assert not {*canary.prompt_ids, *canary.completions[0]} & {PAD, EOS}


def test_any_two_models_differ_about_the_canary_far_more_than_is_allowed(tokenizer):
    canary = make_canary(tokenizer)
    found = [torch.cat(score_groups(make_model(seed=seed), [canary], max_tokens=4096)[0]) for seed in range(4)]
    for i, one in enumerate(found):
        assert all(float((one - other).abs().mean()) > 5 * CANARY_TOLERANCE for other in found[:i])


@pytest.mark.parametrize(
    ("dialect", "spoken"),
    [("topd", "topd"), ("sglang", "SGLang"), ("vllm", "vLLM /v1/comp"), ("echo", "OpenAI")],
)
def test_the_form_is_found_by_asking_and_gives_the_trainers_numbers(right, tokenizer, dialect, spoken):
    base, model = right
    with proxying(base, dialect) as proxy:
        served = served_by(proxy.url, tokenizer=tokenizer)
        found = meeting(served, lambda served: served.score(GROUP))
    assert served.dialect.name.startswith(spoken)
    torch.testing.assert_close(torch.cat(found), expected(model), atol=1e-5, rtol=1e-5)
    assert [len(part) for part in found] == [7, 2, 5]


def test_the_card_tells_what_the_server_knows(right, tokenizer):
    base, model = right
    card = meeting(served_by(base, tokenizer=tokenizer)).card
    assert (card.id, card.root, card.context_length, card.eos_token_ids) == ("m", model.name, 256, (EOS,))
    assert len(card.fingerprint) == 64
    with proxying(base, "vllm") as proxy:
        card = meeting(served_by(proxy.url, tokenizer=tokenizer)).card
    assert (card.fingerprint, card.eos_token_ids) == (None, None)


def cards(*ids, **fields):
    async def models(exchange):
        return faults.Reply(200, json.dumps({"data": [{"id": name, **fields} for name in ids]}).encode())

    return models


@pytest.mark.parametrize(
    ("ids", "name", "said"),
    [
        (("a", "b"), None, "serves 'a', 'b'; wanted teacher.name = None"),
        (("a", "b"), "c", "serves 'a', 'b'; wanted teacher.name = 'c'. Set it to one of them"),
        (("a", "a"), "a", "serves 'a', 'a'; wanted"),
        ((), None, "serves nothing; wanted"),
    ],
)
def test_a_name_that_is_not_one_of_them_is_refused_with_those_that_are(tokenizer, ids, name, said):
    with proxying(NOWHERE) as proxy:
        proxy.give(faults.always(cards(*ids)), "models")
        assert said in refusal(served_by(proxy.url, tokenizer=tokenizer, name=name))


@pytest.mark.parametrize(("name", "ids"), [(None, ("m",)), ("m", ("m", "other")), ("the/root", ("m",))])
def test_one_model_is_chosen_by_id_by_root_or_because_it_is_alone(right, tokenizer, name, ids):
    base, _ = right
    with proxying(base) as proxy:
        proxy.give(faults.always(cards(*ids, root="the/root" if len(ids) == 1 else None)), "models")
        assert meeting(served_by(proxy.url, tokenizer=tokenizer, name=name)).card.id == "m"


@pytest.mark.parametrize("fault", [faults.html, faults.empty, faults.truncated])
def test_what_is_no_list_of_models_is_refused(right, tokenizer, fault):
    with proxying(right[0]) as proxy:
        proxy.give(faults.always(fault), "models")
        assert "/v1/models returned no valid list of models" in refusal(served_by(proxy.url, tokenizer=tokenizer))


CARD_KEYS = ("id", "root", "max_model_len", "topd", "eos_token_ids", "fingerprint", "data")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("m")
JSON = st.recursive(LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(CARD_KEYS), part))


class Telling(Replica):
    """Answers everything with `content`."""

    async def send(self, request, *, timeout_s=None):
        return httpx2.Response(200, text=json.dumps(self.content), request=httpx2.Request("GET", self.url))


TELLING = Telling(NOWHERE, api_key=None, timeout_s=1.0)


@given(content=JSON | st.fixed_dictionaries({"data": JSON}) | JSON.map(lambda card: {"data": [{"id": "m", "topd": card}]}))
def test_any_list_of_models_is_read_or_a_fault(tokenizer, content):
    TELLING.content = content
    try:
        card = asyncio.run(served_by(tokenizer=tokenizer)._read_card(TELLING))
    except Fault:
        return
    assert card.id == "m"
    assert type(card.context_length) in (int, type(None))


def test_a_server_that_gives_no_log_probs_is_refused_with_all_that_was_tried(right, tokenizer):
    with proxying(right[0]) as proxy:
        proxy.give(faults.always(faults.status(404)))
        said = refusal(served_by(proxy.url, tokenizer=tokenizer))
    assert "returns no log-probs of given tokens. Tried:" in said
    assert [word in said for word in ("topd", "SGLang", "prompt_logprobs", "echo")] == [True] * 4


def test_servers_that_cannot_be_reached_are_named_with_a_remedy(tokenizer):
    said = refusal(served_by(NOWHERE, "http://127.0.0.1:10/v1", tokenizer=tokenizer))
    assert said.startswith("teacher.base_url: none of the servers can be used:")
    assert "127.0.0.1:9" in said
    assert "127.0.0.1:10" in said
    assert "topd serve MODEL" in said


def test_servers_that_are_not_one_model_are_refused(right, wrong, tokenizer):
    said = refusal(served_by(right[0], wrong, tokenizer=tokenizer))
    assert "the servers do not serve one model" in said
    assert "has other weights" in said
    assert "Serve one on all" in said
    with proxying(right[0], "vllm") as one, proxying(wrong, "vllm") as other:
        assert "fixed tokens are off by" in refusal(served_by(one.url, other.url, tokenizer=tokenizer))


def test_servers_that_call_it_differently_are_refused(right, tokenizer):
    with serving(right[1], name="m2") as base:
        said = refusal(served_by(right[0], base, tokenizer=tokenizer, name=right[1].name))
    assert "call their model 'm' and 'm2'. Give it one name" in said


def test_the_shortest_context_of_all_servers_counts(right, tokenizer):
    async def shorter(exchange):
        reply = await exchange.forward()
        return reply.with_json({"data": [card | {"max_model_len": 99} for card in reply.json["data"]]})

    with proxying(right[0]) as proxy:
        proxy.give(faults.always(shorter), "models")
        assert meeting(served_by(right[0], proxy.url, tokenizer=tokenizer)).card.context_length == 99


def test_replicas_of_two_kinds_are_refused(right, tokenizer):
    with proxying(right[0], "vllm") as proxy:
        assert "Use servers of one kind" in refusal(served_by(right[0], proxy.url, tokenizer=tokenizer))


def test_one_server_is_enough_and_the_other_joins_when_it_is_there(right, tokenizer):
    async def until_both(served):
        down, up = served.pool.replicas
        assert (down.trusted, up.trusted) == (False, True)
        await served.score(GROUP)
        proxy.give(None, "models")
        await until(lambda: down.trusted)

    with proxying(right[0]) as proxy:
        proxy.give(faults.always(faults.status(500)), "models")
        meeting(served_by(proxy.url, right[0], tokenizer=tokenizer), until_both)


def test_another_model_does_not_join(right, wrong, tokenizer):
    async def a_while(served):
        other, _ = served.pool.replicas
        proxy.give(None, "models")
        await until(lambda: other.is_another_model)
        assert not other.trusted

    with proxying(wrong) as proxy:
        proxy.give(faults.always(faults.status(500)), "models")
        meeting(served_by(proxy.url, right[0], tokenizer=tokenizer), a_while)


def test_servers_that_are_not_there_yet_are_waited_for_if_asked(right, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "WAIT_PAUSE_S", 0.02)
    with proxying(right[0]) as proxy:
        proxy.give(faults.first(2 * module.MEETING_TRIES + 1, faults.status(503)), "models")
        assert meeting(served_by(proxy.url, tokenizer=tokenizer, wait_s=5.0)).card.id == "m"
        proxy.give(faults.first(module.MEETING_TRIES, faults.status(503)), "models")
        assert "answered 503" in refusal(served_by(proxy.url, tokenizer=tokenizer))
        proxy.give(faults.always(faults.status(503)), "models")
        assert "answered 503" in refusal(served_by(proxy.url, tokenizer=tokenizer, wait_s=0.1))


def test_a_server_that_is_busy_at_the_start_is_waited_for(right, tokenizer):
    with proxying(right[0]) as proxy:
        for kind in ("models", "score"):
            proxy.give(faults.first(3, faults.status(429, retry_after="0.05")), kind)
        assert meeting(served_by(proxy.url, tokenizer=tokenizer)).card.id == "m"


@pytest.mark.parametrize(("value", "state"), [(None, "is not set"), ("sk-wrong", "is set, but refused")])
def test_a_refused_key_is_an_error_that_names_the_variable_not_the_key(tokenizer, monkeypatch, value, state):
    monkeypatch.delenv(KEY, raising=False)
    if value is not None:
        monkeypatch.setenv(KEY, value)
    with serving(make_model(), name="m", token="sk-right") as base:
        said = refusal(served_by(base, tokenizer=tokenizer))
        monkeypatch.setenv(KEY, "sk-right")
        assert meeting(served_by(base, tokenizer=tokenizer)).card.id == "m"
    assert f"environment variable {KEY}, which {state}" in said
    assert "sk-" not in said


@pytest.mark.parametrize("key", ["sk-secret\n", " sk-secret", "sk-secr\u00e9t", "sk-sec\tret", "sk-secret\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(tokenizer, monkeypatch, key):
    """The HTTP library's own message would show it."""
    monkeypatch.setenv(KEY, key)
    with pytest.raises(ConfigError, match=f"environment variable {KEY} holds") as caught:
        served_by(NOWHERE, tokenizer=tokenizer)
    error = caught.value
    assert error.__context__ is None
    assert "sk-" not in str(error)


@pytest.mark.parametrize("dialect", faults.DIALECTS)
def test_no_answer_of_another_model_is_ever_taken(right, wrong, tokenizer, dialect):
    """The server behind the URL changes at the n-th request, whichever that is, with and without a broken connection."""
    base, model = right

    async def restarted(served, number, drop):
        restart = faults.restart(wrong, drop=drop)
        proxy.give(lambda n: restart if n == number else None)
        for _ in range(5):
            try:
                found = await served.score(GROUP)
            except OtherModel:
                break
            except Unavailable:
                continue
            torch.testing.assert_close(torch.cat(found), expected(model), atol=1e-5, rtol=1e-5)
        else:
            pytest.fail("it was not found out")
        assert proxy.seen["score"] > number
        assert not served.pool.replicas[0].trusted

    with proxying(base, dialect) as proxy:
        for number, drop in itertools.product((0, 1), (False, True)):
            proxy.give(None)
            proxy.upstream = base.removesuffix("/v1")
            served = served_by(proxy.url, tokenizer=tokenizer, max_attempts=1)
            meeting(served, functools.partial(restarted, number=number, drop=drop))


def test_weights_that_differ_less_than_the_canary_shows_are_found_out_by_their_digest(right, tokenizer):
    """Where the server tells one. Another update of the same run, say."""
    base, model = right
    near = make_model(seed=0)
    with torch.no_grad():
        near.module.get_input_embeddings().weight.mul_(1.0001)

    async def restarted(served):
        proxy.upstream = close_by.removesuffix("/v1")
        with pytest.raises(Fault, match="answers as another model: its weights have changed"):
            await served.score(GROUP)
        [replica] = served.pool.replicas
        await until(lambda: replica.is_another_model)
        proxy.upstream = base.removesuffix("/v1")
        await until(lambda: replica.trusted)
        return await served.score(GROUP)

    with serving(near, name="m") as close_by, proxying(base) as proxy:
        found = meeting(served_by(proxy.url, tokenizer=tokenizer), restarted)
    torch.testing.assert_close(torch.cat(found), expected(model), atol=1e-5, rtol=1e-5)


def test_a_wrong_replica_is_left_out_and_taken_back_once_it_is_right(right, wrong, tokenizer):
    base, model = right

    async def story(served):
        first, second = served.pool.replicas
        first_proxy.upstream = wrong.removesuffix("/v1")
        found = await asyncio.gather(*(served.score(GROUP) for _ in range(8)))
        assert (first.trusted, second.trusted) == (False, True)
        first_proxy.upstream = base.removesuffix("/v1")
        await until(lambda: first.trusted)
        return found

    with proxying(base) as first_proxy, proxying(base) as second_proxy:
        served = served_by(first_proxy.url, second_proxy.url, tokenizer=tokenizer)
        found = meeting(served, story)
    for parts in found:
        torch.testing.assert_close(torch.cat(parts), expected(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dialect", faults.DIALECTS)
def test_behind_a_load_balancer_with_a_wrong_server_no_answer_of_that_is_taken(right, wrong, tokenizer, dialect):
    """Every second connection, canaries included, ends at the other model."""
    base, model = right

    async def elsewhere(exchange):
        exchange.proxy.upstream = wrong.removesuffix("/v1")
        try:
            return await exchange.forward()
        finally:
            exchange.proxy.upstream = base.removesuffix("/v1")

    async def story(served):
        proxy.give(lambda number: elsewhere if number % 2 else None)
        with pytest.raises(OtherModel):
            await served.check_together(served.pool.replicas[0])
        taken = 0
        for _ in range(4):
            try:
                found = await served.score(GROUP)
            except Fault:
                continue
            taken += 1
            torch.testing.assert_close(torch.cat(found), expected(model), atol=1e-5, rtol=1e-5)
        assert taken

    with proxying(base, dialect) as proxy:
        meeting(served_by(proxy.url, tokenizer=tokenizer), story)


@pytest.mark.parametrize("fault", [faults.truncated, faults.html, faults.status(502), faults.cut_off], ids=lambda f: f.__name__)
def test_a_damaged_answer_at_the_first_meeting_costs_a_retry_not_the_form(right, tokenizer, fault):
    with proxying(right[0]) as proxy:
        for kind in ("score", "models"):
            proxy.give(faults.first(module.MEETING_TRIES - 1, fault), kind)
        served = meeting(served_by(proxy.url, tokenizer=tokenizer))
        assert served.dialect.name == "topd /v1/score"
        assert proxy.seen["score"] == module.MEETING_TRIES


def test_a_form_whose_answers_stay_damaged_gives_way_to_the_next(right, tokenizer):
    async def broken(exchange):
        return await (faults.html(exchange) if exchange.request.path == "/v1/score" else exchange.forward())

    with proxying(right[0]) as proxy:
        proxy.give(faults.always(broken))
        served = meeting(served_by(proxy.url, tokenizer=tokenizer))
    assert served.dialect.name.startswith("vLLM /v1/completions")


class Slow(Telling):
    """Takes `seconds` for an answer, which is no score in any form; where `busy`, it asks to wait first."""

    seconds, busy = 2.0, False

    def __init__(self):
        super().__init__(NOWHERE, api_key=None, timeout_s=10.0)
        self.content = {"data": [{"id": "m"}]}
        self.asked = []

    async def send(self, request, *, timeout_s=None):
        self.asked.append(request.path)
        await asyncio.sleep(self.seconds)
        if self.busy and self.asked.count(request.path) == 1:
            raise Busy("come again", 4.0)
        return await super().send(request)


@pytest.mark.parametrize(("patience", "busy"), [(9.0, False), (9.0, True), (3.0, False)])
def test_the_first_meeting_ends_with_patience_however_many_forms_fail(tokenizer, monkeypatch, patience, busy):
    clock, replica = Clock(), Slow()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("tenacity.time", clock)
    replica.busy = busy

    async def meet():
        began = clock.monotonic()
        with pytest.raises(Fault, match="come again" if busy else r"returns no log-probs of given tokens\. Tried:\n    topd"):
            await served_by(tokenizer=tokenizer, patience_s=patience)._meet(replica)
        return clock.monotonic() - began

    assert clock.run(meet()) <= patience + replica.seconds
    assert replica.asked[:2] == ["/v1/models", "/v1/models" if busy else "/v1/score"]


def test_a_server_that_asks_to_wait_longer_than_patience_is_not_waited_for(right, tokenizer):
    async def ask(served):
        proxy.give(faults.always(faults.status(429, retry_after="999999")))
        began = time.monotonic()
        with pytest.raises(Busy):
            await served.ask_canary(served.pool.replicas[0])
        with pytest.raises(Refused, match=r"nothing succeeded for 0.3 s: .* answered 429"):
            await served.score(GROUP)
        assert time.monotonic() - began < 5

    with proxying(right[0]) as proxy:
        meeting(served_by(proxy.url, tokenizer=tokenizer, patience_s=0.3), ask)


def test_no_more_requests_are_in_flight_than_allowed(right, tokenizer):
    with proxying(right[0]) as proxy:

        async def many(served):
            proxy.give(faults.always(faults.delay(0.02)))
            proxy.most_open = 0
            await asyncio.gather(*(served.score(GROUP) for _ in range(20)))

        meeting(served_by(proxy.url, tokenizer=tokenizer), many)
        assert proxy.most_open == 4


def test_the_temperature_is_sent_to_those_that_honour_it_alone(right, tokenizer):
    base, model = right
    settings = dict(role="teacher", name="m", canary=make_canary(tokenizer), temperature=0.7)
    for dialect, at in (("topd", 0.7), ("vllm", 1.0)):
        with proxying(base, dialect) as proxy:
            found = meeting(ServedModel(section(proxy.url), **settings), lambda served: served.score(GROUP))
        at_temperature = torch.cat(score_groups(model, [GROUP], max_tokens=4096, temperature=at)[0])
        torch.testing.assert_close(torch.cat(found), at_temperature, atol=1e-5, rtol=1e-5)


def test_nothing_is_left_behind(right, tokenizer):
    before = threading.active_count()
    meeting(served_by(right[0], tokenizer=tokenizer), lambda served: served.score(GROUP))
    assert threading.active_count() == before


def test_a_canary_with_a_nan_is_another_model(tokenizer):
    served = served_by(tokenizer=tokenizer)
    served.reference = torch.zeros(3)
    served.check_canary("u", torch.full((3,), CANARY_TOLERANCE / 2))
    for found in (torch.full((3,), 2 * CANARY_TOLERANCE), torch.tensor([0.0, float("nan"), 0.0])):
        with pytest.raises(OtherModel):
            served.check_canary("u", found)
