import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops import logprobs
from topd.ops.logprobs import chunked_token_logprobs, token_logprobs

HIDDEN, VOCAB = 6, 11


def draw(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCAB, (tokens,), generator=generator)
    return hidden, head, ids


def test_literal():
    # softmax of (0, log 3) is (1/4, 3/4); at temperature 2 the logits are (0, log sqrt 3): 1 / (1 + 1.7320508)
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    found = token_logprobs(logits, torch.tensor([0, 1]), temperature=1.0)
    assert found.exp().tolist() == pytest.approx([0.25, 0.75])
    found = token_logprobs(logits, torch.tensor([0, 1]), temperature=2.0)
    assert found.exp().tolist() == pytest.approx([0.3660254, 0.6339746])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_equals_log_softmax(temperature):
    hidden, head, ids = draw(9)
    expected = torch.log_softmax(hidden @ head.T / temperature, dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(token_logprobs(hidden @ head.T, ids, temperature=temperature), expected, atol=1e-6, rtol=1e-6)


def test_result_is_float32_and_never_positive():
    logits = torch.tensor([[0.0, 80.0, -80.0]], dtype=torch.bfloat16)
    found = torch.cat([token_logprobs(logits, torch.tensor([i]), temperature=1.0) for i in range(3)])
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([-80.0, 0.0, -160.0])


def test_impossible_token():
    logits = torch.tensor([[0.0, -math.inf]])
    assert token_logprobs(logits, torch.tensor([1]), temperature=1.0).item() == -math.inf
    assert token_logprobs(logits, torch.tensor([0]), temperature=1.0).item() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 100], ids=lambda rows: f"chunk={rows}")
def test_chunks_change_neither_values_nor_gradients(rows, temperature, monkeypatch):
    hidden, head, ids = draw(8)
    hidden.requires_grad_()
    head.requires_grad_()
    pull = torch.linspace(-1, 1, 8)  # a different gradient for every token
    expected = torch.log_softmax(hidden @ head.T / temperature, dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    wanted = torch.autograd.grad((pull * expected).sum(), (hidden, head))

    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * VOCAB)
    seen = []

    def to_logits(chunk):
        seen.append(len(chunk))
        return chunk @ head.T

    found = chunked_token_logprobs(hidden, ids, to_logits, vocab_size=VOCAB, temperature=temperature)
    forward_calls = list(seen)
    gradients = torch.autograd.grad((pull * found).sum(), (hidden, head))
    assert max(forward_calls) <= rows
    assert sum(forward_calls) == 8
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    # one chunk is kept, several are recomputed once each
    assert len(seen) == (1 if rows >= 8 else 2 * len(forward_calls))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_any_length_and_chunk(tokens, rows, seed):
    hidden, head, ids = draw(tokens, seed)
    expected = token_logprobs(hidden @ head.T, ids, temperature=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CHUNK_ELEMENTS", rows * VOCAB)
        found = chunked_token_logprobs(hidden, ids, lambda chunk: chunk @ head.T, vocab_size=VOCAB)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_vocabulary_larger_than_a_chunk_goes_row_by_row(monkeypatch):
    hidden, head, ids = draw(3)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1)
    seen = []
    chunked_token_logprobs(hidden, ids, lambda chunk: seen.append(len(chunk)) or chunk @ head.T, vocab_size=VOCAB)
    assert seen == [1, 1, 1]


def test_gradient_is_one_hot_minus_softmax():
    logits = torch.tensor([[0.2, -1.0, 0.5]], dtype=torch.float32, requires_grad=True)
    token_logprobs(logits, torch.tensor([2]), temperature=1.0).sum().backward()
    expected = torch.tensor([[0.0, 0.0, 1.0]]) - torch.softmax(logits.detach(), dim=-1)
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_by_logits_equals_that_of_log_softmax(dtype, temperature):
    hidden, head, ids = draw(7)
    logits = (hidden @ head.T).to(dtype).requires_grad_()
    before = logits.detach().clone()
    pull = torch.linspace(-1, 1, 7)
    expected = torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    (wanted,) = torch.autograd.grad((pull * expected).sum(), logits)
    found = token_logprobs(logits, ids, temperature=temperature)
    for _ in range(2):  # the backward pass leaves what it saved as it was
        (gradient,) = torch.autograd.grad((pull * found).sum(), logits, retain_graph=True)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, wanted, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=1e-5)
    assert torch.equal(logits.detach(), before)


def test_gradient_is_finite_beside_impossible_tokens_and_extreme_logits():
    logits = torch.tensor([[0.0, -math.inf, 80.0, -80.0]], requires_grad=True)
    token_logprobs(logits, torch.tensor([0]), temperature=1.0).sum().backward()
    # one-hot minus softmax: 1 - 0, 0, -1, 0
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, 0.0, -1.0, 0.0]]))


def test_half_precision_logits_are_divided_in_float32():
    logits = (3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)
    ids = torch.arange(5)
    expected = torch.log_softmax(logits.float() / 0.7, dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(token_logprobs(logits, ids, temperature=0.7), expected, atol=1e-5, rtol=0)
