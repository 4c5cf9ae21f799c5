import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.rollout.sampling import nucleus, sample_tokens

LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])


def even(draws):
    """Evenly spread numbers in [0, 1): frequencies are then exact to 1 / draws."""
    return (torch.arange(draws) + 0.5) / draws


def frequencies(logits, draws=4000, **settings):
    rows = logits.expand(draws, -1)
    token_ids, _ = sample_tokens(rows, even(draws), **settings)
    return torch.bincount(token_ids, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_are_the_softmax_at_that_temperature(temperature):
    expected = torch.softmax(LOGITS / temperature, dim=-1)
    found = frequencies(LOGITS, temperature=temperature, top_p=1.0)
    torch.testing.assert_close(found, expected, atol=2 / 4000, rtol=0)


def test_frequencies_with_random_uniforms():
    draws = 20_000
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    token_ids, _ = sample_tokens(LOGITS.expand(draws, -1), uniforms, temperature=1.0, top_p=1.0)
    found = torch.bincount(token_ids, minlength=5) / draws
    expected = torch.softmax(LOGITS, dim=-1)
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all()  # four standard errors


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_logprobs_are_those_of_the_full_distribution_at_that_temperature(temperature):
    token_ids, logprobs = sample_tokens(LOGITS.expand(50, -1), even(50), temperature=temperature, top_p=0.7)
    expected = torch.log_softmax(LOGITS / temperature, dim=-1)[token_ids]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    assert logprobs.dtype == torch.float32


def test_greedy_takes_the_largest_logit_and_reports_logprobs_at_one():
    logits = torch.stack([LOGITS, -LOGITS])
    for uniform in (0.0, 0.999):
        token_ids, logprobs = sample_tokens(logits, torch.full((2,), uniform), temperature=0.0, top_p=1.0)
        assert token_ids.tolist() == [3, 2]
        assert logprobs.tolist() == pytest.approx([torch.log_softmax(row, -1).max().item() for row in logits])


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        # probabilities 0.4, 0.3, 0.2, 0.1 (shuffled below): the smallest set that reaches top_p
        (1e-6, {1}),
        (0.35, {1}),
        (0.45, {1, 3}),
        (0.65, {1, 3}),
        (0.75, {1, 3, 0}),
        (0.95, {1, 3, 0, 2}),
        (1.0, {1, 3, 0, 2}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, expected):
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    found = frequencies(logits, temperature=1.0, top_p=top_p)
    assert set(found.nonzero().squeeze(-1).tolist()) == expected
    kept = torch.tensor([p if i in expected else 0.0 for i, p in enumerate([0.2, 0.4, 0.1, 0.3])])
    torch.testing.assert_close(found, kept / kept.sum(), atol=2 / 4000, rtol=0)


def slow_nucleus(probs, top_p):
    kept, total = set(), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if total < top_p:
            kept.add(i)
            total += probs[i]
    return kept


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=12, unique=True), st.floats(0.01, 0.99), st.integers(0, 1000))
def test_top_p_never_samples_outside_the_nucleus(values, top_p, seed):
    probs = torch.softmax(torch.tensor(values, dtype=torch.float64), dim=-1).tolist()
    edge = [sum(sorted(probs, reverse=True)[: i + 1]) for i in range(len(probs))]
    if min(abs(top_p - e) for e in edge) < 1e-5:
        return  # the set is decided by rounding
    uniforms = torch.cat([torch.rand(40, generator=torch.Generator().manual_seed(seed)), torch.tensor([0.0, 1 - 2**-24])])
    rows = torch.tensor(values).expand(len(uniforms), -1)
    token_ids, _ = sample_tokens(rows, uniforms, temperature=1.0, top_p=top_p)
    assert set(token_ids.tolist()) <= slow_nucleus(probs, top_p)


def test_nucleus_zeroes_the_rest_and_keeps_the_others_as_they_are():
    probs = torch.tensor([[0.2, 0.4, 0.1, 0.3], [0.97, 0.01, 0.01, 0.01]])
    expected = [[0.0, 0.4, 0.0, 0.3], [0.97, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(nucleus(probs, 0.65), torch.tensor(expected))


def test_a_row_does_not_depend_on_other_rows():
    generator = torch.Generator().manual_seed(3)
    logits, uniforms = torch.randn(16, 9, generator=generator), torch.rand(16, generator=generator)
    settings = dict(temperature=0.8, top_p=0.9)
    token_ids, logprobs = sample_tokens(logits, uniforms, **settings)
    alone = [sample_tokens(logits[i : i + 1], uniforms[i : i + 1], **settings) for i in range(16)]
    assert torch.equal(token_ids, torch.cat([ids for ids, _ in alone]))
    torch.testing.assert_close(logprobs, torch.cat([values for _, values in alone]))
    order = torch.randperm(16, generator=generator)
    assert torch.equal(sample_tokens(logits[order], uniforms[order], **settings)[0], token_ids[order])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24], ids=["smallest", "middle", "largest"])
@pytest.mark.parametrize("possible", [0, 2, 4])
def test_impossible_tokens_are_never_drawn(uniform, possible):
    logits = torch.full((1, 5), -math.inf)
    logits[0, possible] = 3.0
    token_ids, logprobs = sample_tokens(logits, torch.tensor([uniform]), temperature=1.0, top_p=1.0)
    assert token_ids.item() == possible
    assert logprobs.item() == 0.0


@given(st.integers(0, 10_000))
def test_the_extreme_uniforms_draw_possible_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(4, 300, generator=generator)
    logits[:, torch.rand(300, generator=generator) < 0.5] = -math.inf
    logits[:, -5:] = -math.inf
    for uniform in (0.0, 1 - 2**-24):
        _, logprobs = sample_tokens(logits, torch.full((4,), uniform), temperature=1.0, top_p=1.0)
        assert torch.isfinite(logprobs).all()


def test_half_precision_logits_give_float32_logprobs():
    _, logprobs = sample_tokens(LOGITS.bfloat16()[None], torch.tensor([0.5]), temperature=1.0, top_p=1.0)
    assert logprobs.dtype == torch.float32
