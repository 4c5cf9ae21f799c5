"""Every dialect gives the numbers of `score_groups`, or BadAnswer, and nothing else."""

import json
import tracemalloc

import httpx2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.fakes import make_model, ragged_groups
from tests.serve.serving import serving
from topd.endpoint.dialects import Sglang, TopdScore, VllmEcho, VllmPromptLogprobs, read_scores
from topd.endpoint.faults import BadAnswer
from topd.models.logprobs import Tokens, score_groups

SPOKEN = {
    "topd": TopdScore(),
    "sglang": Sglang(),
    "vllm": VllmPromptLogprobs(),
    "echo": VllmEcho(),
}
GROUPS = ragged_groups((4, (7, 2, 5)), (1, (3, 3)), (9, (1,)))
URL = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def served():
    model = make_model("qwen3-untied")
    with serving(model) as base:
        yield model, base


@pytest.fixture(params=SPOKEN)
def spoken(served, request):
    """(dialect, proxy of a server that speaks it, model behind)"""
    model, base = served
    with proxying(base, request.param) as proxy:
        yield SPOKEN[request.param], proxy, model


def send(proxy, dialect, groups, temperature=1.0):
    asked = dialect.encode(groups, model="tiny-qwen3-untied", temperature=temperature)
    response = httpx2.request(asked.method, proxy.url.removesuffix("/v1") + asked.path, json=asked.json)
    assert response.status_code == 200, response.text
    return response


def asked_of(proxy, dialect, groups, temperature=1.0):
    return torch.tensor(read_scores(dialect, send(proxy, dialect, groups, temperature), groups))


def expected(model, groups, temperature=1.0):
    found = score_groups(model, groups, max_tokens=4096, temperature=temperature)
    return torch.cat([part for parts in found for part in parts])


def test_the_numbers_are_those_of_the_trainers_own_function(spoken):
    dialect, proxy, model = spoken
    torch.testing.assert_close(asked_of(proxy, dialect, GROUPS), expected(model, GROUPS), atol=1e-5, rtol=1e-5)


def test_the_temperature_is_honoured_or_said_not_to_be(spoken):
    dialect, proxy, model = spoken
    at = 0.7 if dialect.honours_temperature else 1.0
    found = asked_of(proxy, dialect, GROUPS, temperature=0.7)
    torch.testing.assert_close(found, expected(model, GROUPS, at), atol=1e-5, rtol=1e-5)


WORDS = {
    "model",
    "tiny-qwen3-untied",
    "temperature",
    "groups",
    "prompt",
    "completions",
    "prompt_logprobs",
    "max_tokens",
    "echo",
} | {
    *("logprobs", "return_tokens_as_token_ids", "token_ids", "sampling_params", "prompt_logprob_token_ids"),
    *("prompt_logprob_start", "input_ids", "logprob_start_len", "return_logprob", "return_text_in_logprobs", "max_new_tokens"),
}


def test_nothing_is_sent_as_text_and_no_more_is_generated_than_the_server_asks_for(spoken):
    dialect, proxy, _ = spoken
    proxy.requests.clear()
    asked_of(proxy, dialect, GROUPS)
    for request in proxy.requests:
        words = set(json.dumps(request.json).split('"')[1::2])
        assert words <= WORDS
        limits = {**request.json, **request.json.get("sampling_params", {})}
        assert {limits.get("max_tokens", limits.get("max_new_tokens", 0))} <= {0, 1}


def score_response(**tensors):
    return httpx2.Response(200, content=save(tensors), request=httpx2.Request("POST", URL))


ASKED = [token for group in GROUPS for completion in group.completions for token in completion]
IDS, NUMBERS = torch.tensor(ASKED), torch.full((len(ASKED),), -1.0)


@pytest.mark.parametrize(
    "changed",
    [
        *({"logprobs": NUMBERS.to(dtype)} for dtype in (torch.float8_e4m3fn, torch.complex64, torch.float64, torch.bfloat16)),
        *({"logprobs": NUMBERS.to(dtype)} for dtype in (torch.int64, torch.bool)),
        *({"token_ids": IDS.to(dtype)} for dtype in (torch.float32, torch.float64, torch.int32)),
        {"logprobs": NUMBERS[:, None]},
        {"logprobs": NUMBERS[0].clone()},
        {"token_ids": IDS[:-1].clone()},
    ],
    ids=lambda changed: " ".join(f"{name} {tensor.dtype} {[*tensor.shape]}" for name, tensor in changed.items()),
)
def test_tensors_of_another_type_or_shape_are_bad(changed):
    right = {"token_ids": IDS, "logprobs": NUMBERS}
    assert read_scores(TopdScore(), score_response(**right), GROUPS) == NUMBERS.tolist()
    with pytest.raises(BadAnswer, match=rf"of torch\.\w+ \[.*\] for {len(ASKED)} tokens"):
        read_scores(TopdScore(), score_response(**right | changed), GROUPS)


def test_a_large_tensor_that_was_not_asked_for_is_refused_before_it_becomes_objects():
    response = score_response(token_ids=torch.zeros(31_000_000, dtype=torch.uint8), logprobs=NUMBERS)
    tracemalloc.start()
    with pytest.raises(BadAnswer, match=r"token_ids of torch\.uint8"):
        read_scores(TopdScore(), response, GROUPS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000


def test_an_answer_to_something_else_is_bad(spoken):
    """Wrong numbers, lengths, tokens, order, rows: whatever the dialect can express."""
    dialect, proxy, _ = spoken
    groups = list(GROUPS)
    for name, edit in proxy.dialect.edits.items():
        proxy.give(faults.always(faults.edited(name, edit)))
        with pytest.raises(BadAnswer) as caught:
            read_scores(dialect, send(proxy, dialect, groups), groups)
        assert str(caught.value).startswith("127.0.0.1: ")
    assert proxy.given == list(proxy.dialect.edits)


def test_what_is_no_answer_is_bad(spoken):
    dialect, proxy, _ = spoken
    groups = list(GROUPS)
    for fault in (faults.html, faults.empty, faults.truncated):
        proxy.give(faults.always(fault))
        with pytest.raises(BadAnswer):
            read_scores(dialect, send(proxy, dialect, groups), groups)


@pytest.mark.parametrize("spoken", ["vllm", "echo"], indirect=True)
def test_an_index_that_is_given_twice_is_bad(spoken):
    dialect, proxy, _ = spoken
    proxy.give(faults.always(faults.same_index_twice))
    with pytest.raises(BadAnswer, match="missing or given twice"):
        read_scores(dialect, send(proxy, dialect, GROUPS), GROUPS)


@pytest.mark.parametrize("spoken", ["vllm", "echo"], indirect=True)
def test_choices_in_another_order_are_put_back_by_their_index(spoken):
    dialect, proxy, model = spoken

    async def backwards(exchange):
        reply = await exchange.forward()
        return reply.with_json({**reply.json, "choices": reply.json["choices"][::-1]})

    proxy.give(faults.always(backwards))
    torch.testing.assert_close(asked_of(proxy, dialect, GROUPS), expected(model, GROUPS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spoken", ["vllm"], indirect=True)
def test_the_sampled_token_is_looked_up_by_id_whatever_else_is_there(spoken):
    """vLLM puts the most likely tokens before or after the actual one."""
    dialect, proxy, model = spoken

    async def more(exchange):
        reply = await exchange.forward()
        answer = reply.json
        for choice in answer["choices"]:
            for position in choice["prompt_logprobs"][1:]:
                [(token, found)] = position.items()
                position.clear()
                position |= {"999": {"logprob": -0.01, "rank": 1}, token: found, "998": {"logprob": -0.02, "rank": 2}}
        return reply.with_json(answer)

    proxy.give(faults.always(more))
    torch.testing.assert_close(asked_of(proxy, dialect, GROUPS), expected(model, GROUPS), atol=1e-5, rtol=1e-5)


# answers that no server gave


def response(content):
    return httpx2.Response(200, content=content, request=httpx2.Request("POST", URL))


def read_or_bad(dialect, content):
    groups = [Tokens((5, 6), ((7, 8),))]
    try:
        found = read_scores(dialect, response(content), groups)
    except BadAnswer:
        return
    assert len(found) == 2
    assert all(-9000 < value <= 1e-4 for value in found)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["7", "8", 7, 8, -1.0])
KEYS = st.sampled_from(("choices", "index", "prompt_logprobs", "logprobs", "tokens", "token_logprobs", "logprob", "7", "8")) | (
    st.sampled_from(("meta_info", "input_token_logprobs"))
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20)


@pytest.mark.parametrize("dialect", SPOKEN.values(), ids=SPOKEN)
@settings(max_examples=100)
@given(answer=JSON)
def test_any_json_is_read_or_bad(dialect, answer):
    read_or_bad(dialect, json.dumps(answer).encode())


def in_shape(name, values):
    """An answer of the right shape with these two values."""
    a, b = values
    return {
        "vllm": {"choices": [{"index": 0, "prompt_logprobs": [None, {}, {"7": {"logprob": a}}, {"8": {"logprob": b}}]}]},
        "echo": {
            "choices": [
                {"index": 0, "logprobs": {"tokens": [f"token_id:{t}" for t in (5, 6, 7, 8)], "token_logprobs": [None, -1, a, b]}}
            ]
        },
        "sglang": [{"meta_info": {"input_token_logprobs": [[None, 6, None], [a, 7, None], [b, 8, None]]}}],
    }[name]


@pytest.mark.parametrize("name", ["vllm", "echo", "sglang"])
@given(values=st.tuples(JSON, JSON))
def test_any_value_in_the_right_place_is_read_or_bad(name, values):
    read_or_bad(SPOKEN[name], json.dumps(in_shape(name, values)).encode())


@pytest.mark.parametrize("name", ["vllm", "echo", "sglang"])
@pytest.mark.parametrize(
    "found",
    ["-1" + "0" * 400, "1" * 5000, "true", "false", '"-1.0"', "1e999", "-9999.0", "NaN", "[-1.0]", '"' + "x" * 9999 + '"'],
)
def test_numbers_that_are_none_are_bad(name, found):
    content = json.dumps(in_shape(name, (-0.5, "HERE"))).replace('"HERE"', found)
    with pytest.raises(BadAnswer) as caught:
        read_scores(SPOKEN[name], response(content.encode()), [Tokens((5, 6), ((7, 8),))])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("dialect", SPOKEN.values(), ids=SPOKEN)
def test_json_that_is_nested_too_deeply_is_bad(dialect):
    with pytest.raises(BadAnswer):
        read_scores(dialect, response(b"[" * 100_000), [Tokens((5,), ((7,),))])


GOOD_TENSORS = save({"token_ids": torch.tensor([7, 8]), "logprobs": torch.tensor([-1.0, -2.0])})


@st.composite
def damaged(draw, content):
    """One byte changed, perhaps cut."""
    position = draw(st.integers(0, len(content) - 1))
    changed = content[:position] + bytes([draw(st.integers(0, 255))]) + content[position + 1 :]
    return changed[: draw(st.none() | st.integers(0, len(content)))]


@given(content=damaged(GOOD_TENSORS))
def test_damaged_tensors_are_read_or_bad(content):
    read_or_bad(TopdScore(), content)


@pytest.mark.parametrize(
    "tensors",
    [
        {"token_ids": torch.tensor([7, 8])},
        {"logprobs": torch.tensor([-1.0, -2.0])},
        {"token_ids": torch.tensor([[7, 8]]), "logprobs": torch.tensor([-1.0, -2.0])},
        {"token_ids": torch.tensor([7, 8]), "logprobs": torch.tensor([[-1.0], [-2.0]])},
        {"token_ids": torch.tensor([7, 8]), "logprobs": torch.tensor([-1.0])},
        {"token_ids": torch.tensor([7, 9]), "logprobs": torch.tensor([-1.0, -2.0])},
    ],
)
def test_tensors_of_another_form_are_bad(tensors):
    with pytest.raises(BadAnswer):
        read_scores(TopdScore(), response(save(tensors)), [Tokens((5, 6), ((7, 8),))])
