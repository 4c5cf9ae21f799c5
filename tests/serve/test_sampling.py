"""Completions: reproducible, the same in any company, and cut as vLLM cuts them."""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch

from tests.fakes import EOS, VOCAB, plain_logprobs
from tests.serve.serving import serving
from topd.serve.work import SAMPLING_ROWS

PROMPT = (5, 9, 3, 20)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def client(model):
    with serving(model, max_tokens_per_microbatch=64) as base, httpx2.Client(base_url=base, timeout=30) as client:
        yield client


def sample(client, prompt=PROMPT, **request):
    response = client.post("/completions", json={"prompt": prompt, "return_token_ids": True, "seed": 7, **request})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def ids(choices):
    return [choice["token_ids"] for choice in choices]


def test_a_seed_decides_and_none_draws_anew(client):
    assert ids(sample(client, n=4)) == ids(sample(client, n=4))
    assert ids(sample(client, n=4)) != ids(sample(client, n=4, seed=8))
    assert ids(sample(client, n=4, seed=None)) != ids(sample(client, n=4, seed=None))
    assert ids(sample(client, n=4, seed=-1)) != ids(sample(client, n=4, seed=-1))  # vLLM's way to say none
    assert len({tuple(i) for i in ids(sample(client, n=4))}) == 4
    assert ids(sample(client, n=2)) == ids(sample(client, n=4))[:2]


def test_max_tokens_and_defaults(client):
    [choice] = sample(client)
    assert len(choice["token_ids"]) <= 16
    assert choice["prompt_token_ids"] == list(PROMPT)
    assert choice["logprobs"] is None
    answer = client.post("/completions", json={"prompt": PROMPT, "max_tokens": 3, "n": 2, "seed": 1}).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny-qwen3"
    assert answer["choices"][0]["token_ids"] is None
    num_generated = answer["usage"]["completion_tokens"]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": num_generated, "total_tokens": 4 + num_generated}
    assert num_generated <= 6


def test_company_changes_nothing(client):
    """Other seeds, lengths, temperatures and requests that score, all at once."""
    prompts = [tuple(range(2, 5 + i % 6)) for i in range(24)]

    def ask(i):
        if i % 6 == 5:
            response = client.post("/completions", json={"prompt": prompts[i], "max_tokens": 0, "echo": True, "logprobs": 0})
            return response.json()["choices"][0]["logprobs"]["tokens"]
        return ids(sample(client, prompts[i], seed=i, n=1 + i % 2, max_tokens=8, temperature=0.8 if i % 3 else 1.0))

    alone = [ask(i) for i in range(len(prompts))]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(len(prompts)))) == alone


def test_prompts_and_completions_are_indexed_in_order(client):
    prompts = [PROMPT, (6, 7), (8,)]
    choices = sample(client, prompts, n=2, max_tokens=5)
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [tuple(choice["prompt_token_ids"]) for choice in choices] == [p for p in prompts for _ in range(2)]
    assert ids(choices) == [token_ids for prompt in prompts for token_ids in ids(sample(client, prompt, n=2, max_tokens=5))]


def test_more_completions_than_run_at_once(client):
    many = sample(client, n=2 * SAMPLING_ROWS + 3, max_tokens=2)
    assert len(many) == 2 * SAMPLING_ROWS + 3
    assert ids(many)[:5] == ids(sample(client, n=5, max_tokens=2))
    assert len({tuple(i) for i in ids(many)}) > SAMPLING_ROWS  # the pieces do not repeat each other


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logprobs_are_the_scored_ones_at_that_temperature(client, model, temperature):
    [choice] = sample(client, temperature=temperature, logprobs=0, max_tokens=12)
    expected = plain_logprobs(model.module, PROMPT, tuple(choice["token_ids"]), temperature=temperature or 1.0).detach()
    found = choice["logprobs"]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"]), expected, atol=1e-5, rtol=1e-5)
    assert found["tokens"] == [model.tokenizer.decode([token]) for token in choice["token_ids"]]
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_top_logprobs_of_a_completion(client, model):
    [choice] = sample(client, temperature=0.6, logprobs=3, max_tokens=8, return_tokens_as_token_ids=True)
    row = (*PROMPT, *choice["token_ids"])
    logits = model.module(torch.tensor([row])).logits[0, len(PROMPT) - 1 : -1, :VOCAB].detach()
    expected = torch.log_softmax(logits / 0.6, dim=-1)
    for top, values, token in zip(choice["logprobs"]["top_logprobs"], expected, choice["token_ids"], strict=True):
        best = values.topk(3).indices.tolist()
        assert list(top) == [f"token_id:{i}" for i in dict.fromkeys([token, *best])]
        for name, value in top.items():
            assert value == pytest.approx(values[int(name.removeprefix("token_id:"))].item(), abs=1e-5)


def test_echo_stands_before_the_completion(client, model):
    text = model.tokenizer.decode(PROMPT)
    [plain] = sample(client, logprobs=1, max_tokens=4)
    [echoed] = sample(client, logprobs=1, max_tokens=4, echo=True, prompt_logprobs=0)
    tokens = len(plain["token_ids"])
    assert echoed["token_ids"] == plain["token_ids"]
    assert echoed["logprobs"]["token_logprobs"][-tokens:] == plain["logprobs"]["token_logprobs"]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert len(echoed["logprobs"]["tokens"]) == len(PROMPT) + tokens
    assert [entry and next(iter(entry.values()))["logprob"] for entry in echoed["prompt_logprobs"]] == (
        echoed["logprobs"]["token_logprobs"][: len(PROMPT)]
    )
    response = client.post("/completions", json={"prompt": text, "seed": 7, "max_tokens": 4, "echo": True})
    assert response.json()["choices"][0]["text"] == text + plain["text"]


def test_greedy_takes_the_most_likely(client, model):
    [choice] = sample(client, temperature=0, max_tokens=6)
    row = list(PROMPT)
    for token in choice["token_ids"]:
        assert token == model.module(torch.tensor([row])).logits[0, -1, :VOCAB].argmax().item()
        row.append(token)


def test_top_p_keeps_the_likely_ones(client):
    assert ids(sample(client, top_p=1e-6, max_tokens=6)) == ids(sample(client, temperature=0, max_tokens=6))


def ended(client, **request):
    """A completion that stopped by itself, sooner or later."""
    choices = sample(client, n=SAMPLING_ROWS, max_tokens=200, **request)
    return next(choice for choice in choices if choice["finish_reason"] == "stop" and len(choice["token_ids"]) > 5)


def test_the_end_token_is_sampled_but_not_spelled(client, model):
    choice = ended(client, logprobs=0)
    assert choice["token_ids"][-1] == EOS
    assert choice["text"] == model.tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=True)
    assert ended(client, skip_special_tokens=False)["text"] == model.tokenizer.decode(choice["token_ids"][:-1])
    assert choice["stop_reason"] is None
    assert choice["logprobs"]["tokens"][-1] == "<eos>"
    long = next(c for c in sample(client, n=8, max_tokens=2) if EOS not in c["token_ids"])
    assert (long["finish_reason"], len(long["token_ids"])) == ("length", 2)


@pytest.mark.parametrize("form", [str, list])
def test_stop_strings(client, model, form):
    [whole] = sample(client, max_tokens=16, logprobs=0)
    stop = whole["text"][4:6]
    start = whole["text"].index(stop)
    [cut] = sample(client, max_tokens=16, logprobs=0, stop=stop if form is str else ["never there", stop])
    assert cut["text"] == whole["text"][:start]
    assert cut["token_ids"] == whole["token_ids"][: start + 2]  # up to the token that completes it
    assert cut["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][: start + 2]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_of_two_stop_strings_the_one_complete_first_counts(client):
    [whole] = sample(client, max_tokens=16)
    late, early = whole["text"][2:8], whole["text"][4:6]
    [cut] = sample(client, max_tokens=16, stop=[late, early])
    assert cut["stop_reason"] == early


def test_stop_token_ids_may_name_the_models_own(client):
    assert ids(sample(client, stop_token_ids=[EOS])) == ids(sample(client))
    response = client.post("/completions", json={"prompt": PROMPT, "stop_token_ids": [3]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_token_ids"


def test_scoring_waits_for_no_long_sampling_job(client, model):
    """While 2 x 32 completions of 120 tokens are decoded, many small requests for scores are answered."""
    big = {"prompt": [[2]] * 2, "n": SAMPLING_ROWS, "max_tokens": 120, "seed": 1}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/completions", json=big)
        answered = 0
        while not running.done():
            client.post("/score", json={"groups": [{"prompt": [5, 6], "completions": [[7, 8]]}]}).raise_for_status()
            answered += 1
        assert running.result().status_code == 200
    assert answered > 10


def test_zero_is_a_seed_like_others(client):
    assert ids(sample(client, n=4, seed=0)) == ids(sample(client, n=4, seed=0))


def test_usage_counts_all_prompts_and_completions(client):
    request = {"prompt": [PROMPT, (6, 7)], "max_tokens": 3, "n": 2, "seed": 1, "return_token_ids": True}
    answer = client.post("/completions", json=request).json()
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": generated, "total_tokens": 6 + generated}
