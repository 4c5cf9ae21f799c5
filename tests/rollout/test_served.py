"""Sampling through a server: ids in, ids and log-probs out, all of it checked."""

import threading

import pytest
import torch

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import section, shorten_pauses
from tests.fakes import EOS, VOCAB, make_model, make_prompt
from tests.serve.serving import serving, wait_until
from topd.endpoint.background import Background
from topd.endpoint.faults import BadAnswer
from topd.endpoint.served import ServedModel
from topd.errors import RunStopped
from topd.models.logprobs import score_groups
from topd.models.proof import make_canary
from topd.rollout.engine import SamplingParams
from topd.rollout.served import ServedEngine

PROMPTS = [
    make_prompt((5, 9, 3), name="train/0"),
    make_prompt((7,), name="train/1"),
    make_prompt((4, 4, 8, 2, 6), name="train/2"),
]
PARAMS = SamplingParams(n=3, max_tokens=10, seed=(1, "rollout", 1))


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3-untied", seed=3)


@pytest.fixture(scope="module")
def base(model):
    with serving(model, name="m") as base:
        yield base


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


@pytest.fixture
def proxy(base):
    with proxying(base) as proxy:
        yield proxy


@pytest.fixture
def connect(model):
    """(urls) -> ServedEngine, closed at the end."""
    background = Background()

    def engine(*urls, key="TOPD_TEST_KEY", **limits):
        servers = section(*urls, api_key_env=key, **{"patience_s": 2.0, **limits})
        served = ServedModel(servers, role="teacher", name="m", canary=make_canary(model.tokenizer))
        background.run(served.connect())
        background.at_close(served.close)
        return ServedEngine(served, background, student=model, eos_token_ids=model.eos_token_ids)

    yield engine
    background.close()


def assert_log_probs_are_the_models(groups, model, temperature=1.0):
    expected = score_groups(model, groups, max_tokens=4096, temperature=temperature)
    for group, parts in zip(groups, expected, strict=True):
        for rollout, logprobs in zip(group.rollouts, parts, strict=True):
            torch.testing.assert_close(rollout.logprobs, logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_groups_come_back_in_order_with_the_log_probs_of_their_tokens(connect, model, base, temperature):
    told_tokens, told_groups = [], []
    params = SamplingParams(n=3, max_tokens=10, temperature=temperature, seed=(1,))
    found = connect(base).generate(PROMPTS, params, on_tokens=told_tokens.append, on_groups=told_groups.extend)
    assert [group.prompt for group in found] == PROMPTS
    assert [len(group.rollouts) for group in found] == [3, 3, 3]
    assert_log_probs_are_the_models(found, model, temperature)
    assert sum(told_tokens) == sum(len(c) for group in found for c in group.completions)
    assert {group.prompt.id for group in told_groups} == {prompt.id for prompt in PROMPTS}


def test_completions_end_with_an_end_token_or_at_the_limit(connect, model, base):
    found = connect(base).generate(PROMPTS, SamplingParams(n=16, max_tokens=10, seed=(2,)))
    rollouts = [rollout for group in found for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        stopped = rollout.finish_reason == "stop"
        assert stopped == (rollout.token_ids[-1] == EOS)
        assert stopped or len(rollout.token_ids) == 10
        assert rollout.text == model.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)


def test_a_completion_depends_on_the_seed_and_the_prompts_id_alone(connect, base):
    engine = connect(base)
    first, again = engine.generate(PROMPTS, PARAMS), engine.generate(PROMPTS[::-1], PARAMS)[::-1]
    other = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=10, seed=(1, "rollout", 2)))
    twins = engine.generate([make_prompt((5, 9, 3), name="train/9")], PARAMS)
    assert [g.completions for g in first] == [g.completions for g in again]
    assert [g.completions for g in first] != [g.completions for g in other]
    assert first[0].completions != twins[0].completions


def test_every_setting_is_sent_so_that_no_server_default_matters(connect, base, proxy):
    connect(proxy.url).generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=5, temperature=0.8, top_p=0.9, seed=(1,)))
    sent = next(request.json for request in reversed(proxy.requests) if request.kind == "sample")
    assert {**sent, "seed": 0} == {
        "model": "m",
        "prompt": [5, 9, 3],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def changed(name, change):
    """Change the first choice of a sampling reply, or all of them."""

    async def fault(exchange):
        reply = await exchange.forward()
        answer = reply.json
        change(answer["choices"])
        return reply.with_json(answer)

    return faults.named(name, fault)


def last_logprob(value):
    def change(choices):
        choices[0]["logprobs"]["token_logprobs"][-1] = value

    return change


def last_token(value):
    def change(choices):
        choices[0]["token_ids"][-1] = value

    return change


def shortened(choices):
    """Cut before its end, as by a server with an end token of its own."""
    choice = choices[0]
    choice["token_ids"] = [7]
    choice["logprobs"]["token_logprobs"] = [-1.0]


BAD = [
    changed("a completion too few", lambda choices: choices.pop()),
    changed("a completion too many", lambda choices: choices.append({**choices[0], "index": 3})),
    changed("one index twice", lambda choices: choices[1].update(index=0)),
    changed("no index", lambda choices: choices[0].pop("index")),
    changed("no token ids", lambda choices: choices[0].pop("token_ids")),
    changed("token ids null", lambda choices: choices[0].update(token_ids=None)),
    changed("no tokens", lambda choices: choices[0].update(token_ids=[], logprobs={"token_logprobs": []})),
    changed("no log-probs", lambda choices: choices[0].update(logprobs=None)),
    changed("a log-prob too few", lambda choices: choices[0]["logprobs"]["token_logprobs"].pop()),
    changed("more tokens than allowed", lambda choices: choices[0].update(token_ids=[7] * 11)),
    changed("log-prob none", last_logprob(None)),
    changed("log-prob nan", last_logprob(float("nan"))),
    changed("log-prob minus infinity", last_logprob(float("-inf"))),
    changed("log-prob above zero", last_logprob(0.5)),
    changed("log-prob a string", last_logprob("-1.0")),
    changed("log-prob too large for a float", last_logprob(-(10**400))),
    changed("token outside the vocabulary", last_token(VOCAB)),
    changed("token below zero", last_token(-1)),
    changed("token no integer", last_token(1.0)),
    changed("ended early", shortened),
    changed("other prompt", lambda choices: choices[0].update(prompt_token_ids=[5, 9, 4])),
    faults.html,
    faults.empty,
    faults.truncated,
]


def test_a_bad_answer_is_asked_for_again_and_gives_the_same(connect, base, proxy):
    expected = connect(base).generate(PROMPTS[:1], PARAMS)[0].completions
    engine = connect(proxy.url)
    for fault in BAD:
        proxy.give(faults.first(1, fault), "sample")
        assert engine.generate(PROMPTS[:1], PARAMS)[0].completions == expected, fault.__name__
        assert proxy.seen["sample"] == 2, fault.__name__


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.status(500), "answered 500: no"),
        (faults.status(400), "answered 400: no"),
        (faults.reset_before_headers, "disconnected|reset|read|Read|nothing succeeded"),
        (BAD[0], "2 completions for n = 3"),
        (BAD[19], "ends with token 7, which is not an end token of the student"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_stops_the_run(connect, proxy, fault, said):
    engine = connect(proxy.url, patience_s=0.5)
    proxy.give(faults.always(fault), "sample")
    with pytest.raises(RunStopped, match=said) as caught:
        engine.generate(PROMPTS, PARAMS)
    assert "teacher: a prompt could not be sampled" in str(caught.value)
    assert "--run.resume true" in str(caught.value)


def test_a_refused_key_names_its_variable(connect, proxy, monkeypatch):
    monkeypatch.setenv("TOPD_TEST_KEY", "sk-x")
    engine = connect(proxy.url)
    proxy.give(faults.always(faults.status(401)), "sample")
    with pytest.raises(RunStopped, match="TOPD_TEST_KEY, which is set, but refused") as caught:
        engine.generate(PROMPTS, PARAMS)
    assert "sk-x" not in str(caught.value)


def test_prompts_are_sampled_at_the_same_time_up_to_the_bound(connect, proxy):
    engine = connect(proxy.url, max_concurrent_requests=2)
    now = most = 0
    lock = threading.Lock()

    async def counting(exchange):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            return await faults.delay(0.05)(exchange)
        finally:
            with lock:
                now -= 1

    proxy.give(faults.always(counting), "sample")
    engine.generate([make_prompt((5,), name=f"train/{i}") for i in range(6)], PARAMS)
    assert most == 2


def test_what_is_in_flight_when_one_fails_is_withdrawn(connect, proxy):
    engine = connect(proxy.url)

    async def first_refused(exchange):
        if exchange.request.json["prompt"] == [7]:
            return faults.Reply(400, b"{}")
        return await faults.stall(exchange)

    proxy.give(faults.always(first_refused), "sample")
    with pytest.raises(RunStopped):
        engine.generate(PROMPTS, PARAMS)
    wait_until(lambda: engine.served.pool.replicas[0].outstanding == 0)


def test_a_group_is_of_the_version_that_began_it(connect, base, monkeypatch):
    engine = connect(base)
    engine.policy_version = 3
    send = engine.served.pool.send

    async def slow(*args, **options):
        engine.policy_version = 4
        return await send(*args, **options)

    monkeypatch.setattr(engine.served.pool, "send", slow)
    [group] = engine.generate(PROMPTS[:1], PARAMS)
    assert group.policy_version == 3


def test_an_end_token_is_no_text_and_nothing_may_follow_it(connect, base):
    """Also one that is an ordinary token of the student's tokenizer."""
    engine = connect(base)
    engine.eos_token_ids = (EOS, 7)

    def rollout(*token_ids):
        logprobs = {"token_logprobs": [-1.0] * len(token_ids)}
        return engine._rollout({"token_ids": list(token_ids), "logprobs": logprobs, "finish_reason": "stop"}, PROMPTS[0], PARAMS)

    assert rollout(5, 6, 7).text == rollout(5, 6, EOS).text == "34"
    assert rollout(5, EOS, 6, 7).finish_reason == "stop"
    engine.strict_ends = True
    with pytest.raises(BadAnswer, match="goes on after an end token"):
        rollout(5, EOS, 6, 7)
