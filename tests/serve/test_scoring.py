"""The numbers of the server are those of models/logprobs.py, whatever the form they are asked for in, and whoever asks beside."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from safetensors.torch import load as load_safetensors

from tests.fakes import EOS, VOCAB, plain_logprobs, ragged_groups
from tests.serve.serving import running, serving, wait_until
from tests.serve.test_clients import num_queued
from topd.models.logprobs import score_groups
from topd.serve import work, worker

TOLERANCE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def client(model):
    with serving(model, max_tokens_per_microbatch=64) as base, httpx2.Client(base_url=base, timeout=30) as client:
        yield client


def complete(client, **request):
    response = client.post("/completions", json={"max_tokens": 0, "echo": True, **request})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def score(client, groups, **request):
    groups = [dict(prompt=list(g.prompt_ids), completions=[list(c) for c in g.completions]) for g in groups]
    response = client.post("/score", json={"groups": groups, **request})
    assert response.status_code == 200, response.text
    return load_safetensors(response.content)["logprobs"]


def oracle(model, groups, **settings):
    parts = [plain_logprobs(model.module, g.prompt_ids, c, **settings) for g in groups for c in g.completions]
    return torch.cat(parts).detach()


def echoed(choice):
    """The log-probs of a choice from its second token on."""
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    return torch.tensor(rest)


GROUPS = ragged_groups((5, (3, 7, 1)), (1, (4,)), (12, (6, 2)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score(client, model, temperature):
    response = client.post(
        "/score",
        json={
            "model": model.name,
            "groups": [dict(prompt=g.prompt_ids, completions=g.completions) for g in GROUPS],
            "temperature": temperature,
        },
    )
    assert response.headers["content-type"] == "application/x-safetensors"
    tensors = load_safetensors(response.content)
    assert tensors["token_ids"].dtype == torch.int64
    assert tensors["token_ids"].tolist() == [token for g in GROUPS for c in g.completions for token in c]
    assert tensors["logprobs"].dtype == torch.float32
    torch.testing.assert_close(tensors["logprobs"], oracle(model, GROUPS, temperature=temperature), **TOLERANCE)
    card = client.get("/models").json()["data"][0]
    assert response.headers["x-topd-fingerprint"] == card["topd"]["fingerprint"]
    assert card["topd"]["fingerprint"].encode() in response.content
    assert model.name.encode() in response.content


ROWS = [(*g.prompt_ids, *c) for g in GROUPS for c in g.completions]


def test_echo_covers_the_prompt(client, model):
    for row, choice in zip(ROWS, complete(client, prompt=ROWS, logprobs=0), strict=True):
        expected = plain_logprobs(model.module, row[:1], row[1:]).detach()
        torch.testing.assert_close(echoed(choice), expected, **TOLERANCE)
        found = choice["logprobs"]
        assert found["tokens"] == list(model.tokenizer.decode(row))
        assert found["text_offset"] == list(range(len(row)))
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][1:] == [
            {token: value} for token, value in zip(found["tokens"][1:], found["token_logprobs"][1:], strict=True)
        ]
        assert choice["text"] == model.tokenizer.decode(row)
        assert choice["prompt_logprobs"] is None
        assert choice["finish_reason"] == "length"


def test_prompt_logprobs_have_the_actual_token_and_the_best_ones(client, model):
    [choice] = complete(client, prompt=ROWS[1], prompt_logprobs=3)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    logits = model.module(torch.tensor([ROWS[1]])).logits[0, :-1, :VOCAB].detach()
    expected = torch.log_softmax(logits, dim=-1)
    for entries, row, token in zip(rest, expected, ROWS[1][1:], strict=True):
        rank = int((row >= row[token]).sum())
        best = row.topk(3).indices.tolist()
        assert list(entries) == [str(i) for i in dict.fromkeys([token, *best])]
        assert entries[str(token)]["rank"] == rank
        assert [entries[str(i)]["rank"] for i in best] == [1, 2, 3]
        for token_id, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(token_id)].item(), abs=1e-5)
            assert entry["decoded_token"] == model.tokenizer.decode([int(token_id)])


def test_prompt_logprobs_zero_has_ranks_of_the_actual_token_alone(client):
    [choice] = complete(client, prompt=ROWS[0], prompt_logprobs=0)
    assert choice["logprobs"] is None
    assert [list(entries) for entries in choice["prompt_logprobs"][1:]] == [[str(token)] for token in ROWS[0][1:]]
    assert all(entry["rank"] >= 1 for entries in choice["prompt_logprobs"][1:] for entry in entries.values())


def test_top_logprobs_of_echo_are_those_of_prompt_logprobs(client, model):
    [choice] = complete(client, prompt=ROWS[2], logprobs=2, prompt_logprobs=4, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ROWS[2]]
    for top, entries in zip(choice["logprobs"]["top_logprobs"][1:], choice["prompt_logprobs"][1:], strict=True):
        wanted = list(entries.items())[:1] + [e for e in entries.items() if e[1]["rank"] <= 2]
        assert top == {f"token_id:{token_id}": entry["logprob"] for token_id, entry in wanted}


def test_ranks_are_computed_only_when_asked(client, monkeypatch):
    from topd.serve import worker

    def fail(*args, **kwargs):
        raise AssertionError("ranks were computed")

    monkeypatch.setattr(worker, "ranked_logprobs", fail)
    complete(client, prompt=ROWS[0], logprobs=0)
    score(client, GROUPS)


def test_rows_that_begin_alike_score_as_they_do_alone(client):
    rows = [(2, 3, 4, 5), (2, 3, 4, 6, 7), (2, 3, 4), (2, 3, 4, 5), (2,), (9, 3), (2, 3, 4, 6, 8, 9)]
    together = complete(client, prompt=rows, prompt_logprobs=1)
    for row, choice in zip(rows, together, strict=True):
        [alone] = complete(client, prompt=row, prompt_logprobs=1)
        for one, other in zip(choice["prompt_logprobs"], alone["prompt_logprobs"], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.keys() == other.keys()
                for token in one:
                    assert one[token]["rank"] == other[token]["rank"]
                    assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-5)


def test_a_shared_prompt_is_run_once(client, model):
    shapes = []
    handle = model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        complete(client, prompt=[(*range(2, 12), token) for token in (12, 13, 14, 15)], logprobs=0)
    finally:
        handle.remove()
    assert sorted(shapes) == [(1, 9), (1, 9), (4, 1)]  # to score it, and for the tails to read


def test_text_and_ids_give_the_same(client, model):
    text = "1+2=3"
    ids = model.tokenizer.encode(text)
    by_text, by_ids = (complete(client, prompt=prompt, logprobs=0, prompt_logprobs=1) for prompt in (text, ids))
    assert by_text == by_ids
    several = complete(client, prompt=[text, "7"], logprobs=0)
    torch.testing.assert_close(echoed(several[0]), echoed(by_ids[0]), **TOLERANCE)
    assert several[1]["logprobs"]["token_logprobs"] == [None]
    assert [choice["index"] for choice in several] == [0, 1]


def test_an_end_token_in_the_prompt_is_a_token_like_others(client, model):
    row = (5, 6, EOS, 7)
    [choice] = complete(client, prompt=row, logprobs=0)
    torch.testing.assert_close(echoed(choice), plain_logprobs(model.module, row[:1], row[1:]).detach(), **TOLERANCE)
    assert choice["text"] == model.tokenizer.decode(row)


def test_without_scores_an_echo_is_just_that(client):
    [choice] = complete(client, prompt="1+2", return_token_ids=True)
    assert (choice["text"], choice["logprobs"], choice["token_ids"]) == ("", None, [])  # vLLM: ids in place of the text
    assert complete(client, prompt="1+2")[0]["text"] == "1+2"


def test_many_clients_get_what_each_would_get_alone(client, model):
    batches = [ragged_groups((3 + i % 5, (2, 4 + i % 3)), (1, (3,)), seed=i) for i in range(24)]

    def ask(i):
        if i % 3:
            return score(client, batches[i], temperature=1.0 if i % 2 else 0.5)
        rows = [(*g.prompt_ids, *c) for g in batches[i] for c in g.completions]
        choices = complete(client, prompt=rows, logprobs=i % 2)
        sizes = [len(c) for g in batches[i] for c in g.completions]
        return torch.cat([echoed(choice)[-size:] for choice, size in zip(choices, sizes, strict=True)])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(len(batches))))
    for i, (groups, logprobs) in enumerate(zip(batches, found, strict=True)):
        temperature = 0.5 if i % 3 and not i % 2 else 1.0
        torch.testing.assert_close(logprobs, oracle(model, groups, temperature=temperature), **TOLERANCE)


# --- in pieces


@pytest.fixture
def in_pieces(monkeypatch):
    """Requests of more than 64 tokens are cut, and groups of more than two completions."""
    monkeypatch.setattr(work, "SCORING_TOKENS", 1)
    monkeypatch.setattr(work, "SCORING_ROWS", 2)


MANY = ragged_groups((5, (9, 3, 8)), (40, (2, 30, 4, 5)), (1, (1,)), *[(3, (20,))] * 5)


def test_a_large_request_is_scored_in_pieces_as_it_is_at_once(client, model, in_pieces):
    torch.testing.assert_close(score(client, MANY, temperature=0.7), oracle(model, MANY, temperature=0.7), **TOLERANCE)


def test_ranks_of_many_prompts_are_found_in_pieces(client, monkeypatch):
    rows = [(*g.prompt_ids, *c) for g in MANY for c in g.completions]
    whole = complete(client, prompt=rows, logprobs=3, prompt_logprobs=2)
    monkeypatch.setattr(work, "SCORING_TOKENS", 1)
    for one, other in zip(complete(client, prompt=rows, logprobs=3, prompt_logprobs=2), whole, strict=True):
        torch.testing.assert_close(echoed(one), echoed(other), **TOLERANCE)
        for own, before in zip(one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True):
            assert [entry["rank"] for entry in own.values()] == [entry["rank"] for entry in before.values()]
            assert own.keys() == before.keys()


def test_others_are_answered_between_the_pieces_of_a_large_request(model, in_pieces, monkeypatch):
    begun, go_on, done = threading.Event(), threading.Event(), []

    def slow(*args, **settings):
        begun.set()
        assert go_on.wait(10)
        return score_groups(*args, **settings)

    monkeypatch.setattr(worker, "score_groups", slow)
    with (
        running(model, max_tokens_per_microbatch=64) as (base, server),
        httpx2.Client(base_url=base, timeout=30) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        large = pool.submit(score, client, MANY)
        large.add_done_callback(lambda _: done.append("large"))
        assert begun.wait(10)
        small = pool.submit(score, client, MANY[:1], temperature=0.5)
        small.add_done_callback(lambda _: done.append("small"))
        wait_until(lambda: len(server.worker.queue._requests) == 2)
        go_on.set()
        torch.testing.assert_close(large.result(), oracle(model, MANY), **TOLERANCE)
    assert done == ["small", "large"]


def test_a_client_that_leaves_takes_the_pieces_that_wait_along(model, in_pieces):
    groups = [dict(prompt=g.prompt_ids, completions=g.completions) for g in MANY]
    with serving(model, max_tokens_per_microbatch=64, allow_reload=True) as base:
        httpx2.post(base.replace("/v1", "/pause?mode=wait"), json={})
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{base}/score", json={"groups": groups}, timeout=0.3)
        wait_until(lambda: num_queued(base) == 0)
        httpx2.post(base.replace("/v1", "/resume"), json={})
        assert "topd_serve_scored_tokens_total 0.0" in httpx2.get(base.replace("/v1", "/metrics")).text


def test_pieces_have_the_same_bytes_whoever_asks_beside_if_that_is_asked_for(model, in_pieces):
    def ask(client, i):
        return score(client, MANY if i % 2 else MANY[2:])

    with (
        serving(model, max_tokens_per_microbatch=64, batch_invariant=True) as base,
        httpx2.Client(base_url=base, timeout=30) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        alone = [ask(client, i) for i in range(2)]
        for i, together in enumerate(pool.map(lambda i: ask(client, i), range(12))):
            assert torch.equal(together, alone[i % 2])


# --- models


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "llama"])
def test_other_architectures(kind, tiny_model):
    model = tiny_model(kind)
    with serving(model) as base, httpx2.Client(base_url=base, timeout=30) as client:
        torch.testing.assert_close(score(client, GROUPS), oracle(model, GROUPS), **TOLERANCE)


def test_a_long_prefix_does_not_stretch_short_rows():
    """Groups of like size are computed together: a pass pads all rows to the longest."""
    from topd.models.logprobs import Tokens
    from topd.serve.worker import by_size

    long, short, tiny = Tokens((1,), ((2,) * 500,)), Tokens((1,) * 500, ((2,) * 100,) * 8), Tokens((1,), ((2,),))
    asked = []

    def score(groups):
        asked.append(groups)
        return [len(group.prompt_ids) for group in groups]

    assert by_size([long, short, tiny, long], score) == [1, 500, 1, 1]
    assert asked == [[long, long], [short], [tiny]]
