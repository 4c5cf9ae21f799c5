"""The thread that runs the model, without a server: what it computes for work of every kind, alone and in a batch."""

import pytest
import torch

from tests.fakes import VOCAB, make_model, make_prompt, plain_logprobs, ragged_groups
from topd.models.logprobs import RankedLogprobs
from topd.rollout.engine import SamplingParams
from topd.serve.metrics import ServerMetrics
from topd.serve.queue import Task
from topd.serve.weights import fingerprint
from topd.serve.work import Sampling, Scoring
from topd.serve.worker import Worker

TOLERANCE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def worker(model):
    return Worker(model, ServerMetrics(), max_queue=10, max_tokens=64)


def run(worker, *works):
    """The results of work that runs together."""
    tasks = [Task(work, object()) for work in works]
    worker._run(tasks)
    return [task.future.result(0) for task in tasks]


def distribution(model, prompt, completion, temperature):
    """[token, vocab] log-probs at the positions of a completion."""
    row = torch.tensor([(*prompt, *completion)])
    with torch.no_grad():
        logits = model.module(row).logits[0, len(prompt) - 1 : -1, :VOCAB]
    return torch.log_softmax(logits / temperature, dim=-1)


def assert_ranked(model, prompt, completion, temperature, ranked: RankedLogprobs, top_k):
    expected = distribution(model, prompt, completion, temperature)
    own = expected.gather(-1, torch.tensor(completion)[:, None])
    torch.testing.assert_close(ranked.logprobs, own.squeeze(-1), **TOLERANCE)
    assert ranked.ranks.tolist() == (expected >= own).sum(-1).tolist()
    top = expected.topk(top_k, dim=-1)
    assert ranked.top_ids.tolist() == top.indices.tolist()
    torch.testing.assert_close(ranked.top_logprobs, top.values, **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_work_gets_its_own_groups_at_the_temperature_of_all(worker, model, temperature):
    groups = ragged_groups((5, (3, 7)), (1, (4,)), (12, (6, 2)), (2, (1,)))
    parts = [groups[:1], groups[1:3], groups[3:]]
    found = run(worker, *(Scoring(groups=tuple(part), temperature=temperature) for part in parts))
    for part, scored in zip(parts, found, strict=True):
        assert scored.ranked is None
        assert scored.fingerprint == worker.fingerprint
        for group, logprobs in zip(part, scored.logprobs, strict=True):
            for completion, own in zip(group.completions, logprobs, strict=True):
                expected = plain_logprobs(model.module, group.prompt_ids, completion, temperature=temperature).detach()
                torch.testing.assert_close(own, expected, **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ranks_are_at_the_temperature_of_the_scores_and_as_many_as_the_greediest_wants(worker, model, temperature):
    groups = ragged_groups((5, (3, 7)), (1, (4,)))
    works = [Scoring(groups=(group,), temperature=temperature, top_k=k) for group, k in zip(groups, (0, 3), strict=True)]
    for group, scored in zip(groups, run(worker, *works), strict=True):
        [ranked] = scored.ranked
        for completion, own, plain in zip(group.completions, ranked, scored.logprobs[0], strict=True):
            assert_ranked(model, group.prompt_ids, completion, temperature, own, 3)
            assert torch.equal(own.logprobs, plain)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_ranks_of_sampled_tokens_are_at_the_sampling_temperature(worker, model, temperature):
    """Greedy tokens have their log-probs at 1."""
    params = SamplingParams(n=1 if temperature == 0 else 2, max_tokens=4, temperature=temperature)
    works = [Sampling(prompt=make_prompt((5, 9, 3), name=name), params=params, top_k=k) for name, k in (("a", 1), ("b", 2))]
    for work, sampled in zip(works, run(worker, *works), strict=True):
        assert sampled.group.prompt is work.prompt
        for rollout, ranked in zip(sampled.group.rollouts, sampled.ranked, strict=True):
            assert_ranked(model, (5, 9, 3), rollout.token_ids, temperature or 1.0, ranked, 2)
            torch.testing.assert_close(rollout.logprobs, ranked.logprobs, **TOLERANCE)


def test_without_top_k_nothing_is_ranked(worker):
    params = SamplingParams(n=1, max_tokens=2)
    [sampled] = run(worker, Sampling(prompt=make_prompt((5,)), params=params))
    assert sampled.ranked is None


def test_the_fingerprint_depends_on_every_weight():
    model = make_model("qwen3-untied")
    marks = {fingerprint(model)}
    with torch.no_grad():
        for number, parameter in enumerate(model.module.parameters(), 2):
            parameter.view(-1)[-1] += 1e-3
            marks.add(fingerprint(model))
            assert len(marks) == number
