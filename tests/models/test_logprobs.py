import pytest
import torch

from tests.fakes import EOS, KINDS, VOCAB, make_model, plain_logprobs, ragged_groups
from topd.models import logprobs as models_logprobs
from topd.models.logprobs import Tokens, completion_logprobs, forward, microbatches, ranked_logprobs, rows_of, score_groups
from topd.models.policy import recompute_layers
from topd.ops import logprobs as ops_logprobs
from topd.types import Forward

BATCHES = {
    "even": ((6, (5, 5)), (6, (5, 5))),
    "ragged": ((3, (7, 1, 4)), (9, (2, 6)), (1, (5, 3)), (14, (12,))),
    "one-token prompts": ((1, (6, 1)), (1, (3, 9))),
    "one token each": ((1, (1,)), (8, (1, 1))),
    "longer than the window": ((17, (11, 9)), (2, (13, 1))),
}

TOLERANCE = dict(atol=1e-5, rtol=1e-5)


def oracle(model, groups, **settings):
    parts = [plain_logprobs(model.module, g.prompt_ids, c, **settings) for g in groups for c in g.completions]
    return torch.cat(parts)


def gradients(model, values):
    """Of a sum with a different weight on every token."""
    pull = torch.linspace(-1, 1, len(values))
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad((pull * values).sum() / len(values), parameters, allow_unused=True)
    return {name: torch.zeros(()) if grad is None else grad for name, grad in zip(names, found, strict=True)}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_all_gradients_equal_plain_forward_passes(kind, batch, tiny_model):
    model, groups = tiny_model(kind), ragged_groups(*BATCHES[batch])
    expected, found = oracle(model, groups), completion_logprobs(model, groups)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_gradients(gradients(model, found), gradients(model, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_sensitive(kind, tiny_model):
    """One token changed, at the far end of the prompt: the log-probs move by far more than the tolerance."""
    model = tiny_model(kind)
    (group,) = ragged_groups((9, (4,)))
    changed = Tokens((group.prompt_ids[0] % (VOCAB - 3) + 2, *group.prompt_ids[1:]), group.completions)
    assert changed != group
    difference = completion_logprobs(model, [changed]) - completion_logprobs(model, [group])
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_change_nothing(kind):
    model, groups = make_model(kind), ragged_groups(*BATCHES["ragged"])
    expected = oracle(model, groups)
    wanted = gradients(model, expected)
    recompute_layers(model)
    found = completion_logprobs(model, groups)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_gradients(gradients(model, found), wanted)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("temperature", [0.5, 1.6])
def test_temperature(kind, temperature, tiny_model):
    model, groups = tiny_model(kind), ragged_groups(*BATCHES["ragged"])
    expected = oracle(model, groups, temperature=temperature)
    found = completion_logprobs(model, groups, temperature=temperature)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_gradients(gradients(model, found), gradients(model, expected))


def test_many_chunks_of_the_output_head_change_nothing(tiny_model, monkeypatch):
    model, groups = tiny_model("gemma2"), ragged_groups(*BATCHES["ragged"])
    expected = oracle(model, groups)
    monkeypatch.setattr(ops_logprobs, "CHUNK_ELEMENTS", 3 * VOCAB)
    found = completion_logprobs(model, groups)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same_gradients(gradients(model, found), gradients(model, expected))


def test_tied_and_untied_heads_are_really_that(tiny_model):
    for kind, tied in (("qwen3", True), ("qwen3-untied", False)):
        module = tiny_model(kind).module
        assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied


def parts_of(model, groups, **settings):
    """Log-probs by (prompt, completion)."""
    keys = [(g.prompt_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        flat = completion_logprobs(model, groups, **settings)
    return dict(zip(keys, flat.split([len(c) for _, c in keys]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_groups_and_rows_and_company_change_nothing(kind, tiny_model):
    model, groups = tiny_model(kind), ragged_groups(*BATCHES["ragged"])
    expected = parts_of(model, groups)
    shuffled = [Tokens(g.prompt_ids, g.completions[::-1]) for g in groups[::-1]]
    alone = {key: value for group in groups for key, value in parts_of(model, [group]).items()}
    for found in (parts_of(model, shuffled), alone):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, **TOLERANCE)


@pytest.mark.parametrize("max_tokens", [1, 8, 20, 40, 10_000])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_score_groups_does_not_depend_on_the_size_of_micro_batches(kind, max_tokens, tiny_model):
    model, groups = tiny_model(kind), ragged_groups(*BATCHES["ragged"], *BATCHES["one-token prompts"])
    told = []
    found = score_groups(model, groups, max_tokens=max_tokens, on_tokens=told.append)
    assert sum(told) == sum(len(c) for g in groups for c in g.completions)
    assert [len(parts) for parts in found] == [len(g.completions) for g in groups]
    for group, parts in zip(groups, found, strict=True):
        for completion, part in zip(group.completions, parts, strict=True):
            assert part.device.type == "cpu"
            assert not part.requires_grad
            torch.testing.assert_close(part, plain_logprobs(model.module, group.prompt_ids, completion).detach(), **TOLERANCE)


def test_score_groups_temperature_and_targets(tiny_model):
    model, groups = tiny_model("llama"), ragged_groups(*BATCHES["ragged"])
    # look up the end token in place of the last token of every completion; what is fed stays the same
    targets = [Tokens(g.prompt_ids, tuple((*c[:-1], EOS) for c in g.completions)) for g in groups]
    found = score_groups(model, groups, max_tokens=20, temperature=0.7, targets=targets)
    for group, parts in zip(groups, found, strict=True):
        for completion, part in zip(group.completions, parts, strict=True):
            # causal: the fed last token has no influence, so the oracle may feed the target
            expected = plain_logprobs(model.module, group.prompt_ids, (*completion[:-1], EOS), temperature=0.7)
            torch.testing.assert_close(part, expected.detach(), **TOLERANCE)


def test_targets_in_the_middle_are_looked_up_but_not_fed(tiny_model):
    model = tiny_model("qwen3")
    (group,) = ragged_groups((4, (5,)))
    completion = group.completions[0]
    other = next(token for token in range(2, VOCAB) if token not in completion)
    targets = [Tokens(group.prompt_ids, ((*completion[:2], other, *completion[3:]),))]
    with torch.no_grad():
        found = completion_logprobs(model, [group], targets=targets)
        usual = completion_logprobs(model, [group])
    changed = (found - usual).abs() > 1e-6
    assert changed.tolist() == [False, False, True, False, False]
    prefix = (*completion[:2], other)
    torch.testing.assert_close(found[2], plain_logprobs(model.module, group.prompt_ids, prefix)[2].detach(), **TOLERANCE)


def test_prompts_run_once_per_group(tiny_model):
    """The work: one pass over prompts (their last token excluded), one over completions."""
    model, groups = tiny_model("qwen3"), ragged_groups((9, (4, 3, 2)), (6, (4, 4, 4)))
    shapes = []
    handle = model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        completion_logprobs(model, groups)
    finally:
        handle.remove()
    assert shapes == [(2, 8), (6, 4)]


# --- ranks


@pytest.mark.parametrize("max_tokens", [8, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_top_tokens_are_those_of_a_plain_log_softmax(kind, max_tokens, tiny_model):
    model, groups = tiny_model(kind), ragged_groups(*BATCHES["ragged"])
    told = []
    found = ranked_logprobs(model, groups, max_tokens=max_tokens, top_k=3, temperature=0.7, on_tokens=told.append)
    assert sum(told) == sum(len(c) for g in groups for c in g.completions)
    for group, parts in zip(groups, found, strict=True):
        for completion, part in zip(group.completions, parts, strict=True):
            ids = torch.tensor([[*group.prompt_ids, *completion]])
            logits = model.module(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1, :VOCAB].detach()
            expected = torch.log_softmax(logits / 0.7, dim=-1)
            own = expected.gather(-1, torch.tensor(completion)[:, None])
            torch.testing.assert_close(part.logprobs, own.squeeze(-1), **TOLERANCE)
            assert part.ranks.tolist() == (expected >= own).sum(dim=-1).tolist()
            best = expected.topk(3, dim=-1)
            assert torch.equal(part.top_ids, best.indices)
            torch.testing.assert_close(part.top_logprobs, best.values, **TOLERANCE)


def test_ranks_have_no_limit_but_the_vocabulary_and_need_none(tiny_model):
    model, groups = tiny_model("llama"), ragged_groups((4, (3, 2)))
    [all_tokens], [none] = (ranked_logprobs(model, groups, max_tokens=100, top_k=k) for k in (1000, 0))
    assert [part.top_ids.shape for part in all_tokens] == [(3, VOCAB), (2, VOCAB)]
    assert [part.top_ids.shape for part in none] == [(3, 0), (2, 0)]
    for part, other in zip(all_tokens, none, strict=True):
        assert torch.equal(part.ranks, other.ranks)
        assert part.top_logprobs.exp().sum(dim=-1).tolist() == pytest.approx([1] * len(part.ranks), abs=1e-5)


def test_ranks_need_few_logits_at_a_time(tiny_model, monkeypatch):
    model, groups = tiny_model("gemma2"), ragged_groups(*BATCHES["ragged"])
    expected = ranked_logprobs(model, groups, max_tokens=10_000, top_k=2)
    monkeypatch.setattr(models_logprobs, "CHUNK_ELEMENTS", 3 * VOCAB)
    rows = []
    handle = model.module.get_output_embeddings().register_forward_hook(lambda _, args, out: rows.append(len(out)))
    try:
        found = ranked_logprobs(model, groups, max_tokens=10_000, top_k=2)
    finally:
        handle.remove()
    assert max(rows) == 3
    for part, other in zip((p for g in found for p in g), (p for g in expected for p in g), strict=True):
        assert torch.equal(part.ranks, other.ranks)
        torch.testing.assert_close(part.top_logprobs, other.top_logprobs, **TOLERANCE)


def test_equal_tokens_share_the_worse_rank(tiny_model):
    model = make_model("qwen3-untied")
    with torch.no_grad():
        model.module.get_output_embeddings().weight.zero_()
    [[part]] = ranked_logprobs(model, ragged_groups((2, (3,))), max_tokens=100, top_k=0)
    assert part.ranks.tolist() == [VOCAB] * 3


# --- micro-batches


def test_microbatches_keep_groups_of_like_length_together_and_respect_the_limit():
    groups = ragged_groups((2, (4, 4)), (2, (3, 1)), (2, (6,)), (2, (2, 2, 2)))
    batches = list(microbatches(groups, 24))
    # longest first: 1 row * (2 + 6) = 8, with the next group 3 rows * 8 = 24; then 2 rows * 5 = 10, and 5 * 5 would not fit
    batches = [rows_of(groups, pieces) for pieces in batches]
    assert batches == [[groups[2], groups[0]], [groups[1]], [groups[3]]]
    for batch in batches:
        rows = sum(len(g.completions) for g in batch)
        assert rows * (2 + max(len(c) for g in batch for c in g.completions)) <= 24


def test_a_group_that_does_not_fit_is_cut_by_rows_in_order():
    [group] = ragged_groups((2, (4, 4, 3, 4, 1)))
    pieces = [piece for batch in microbatches([group], 12) for piece in rows_of([group], batch)]  # 12 // (2 + 4) = 2 rows
    assert [len(piece.completions) for piece in pieces] == [2, 2, 1]
    assert tuple(c for piece in pieces for c in piece.completions) == group.completions
    assert len(list(microbatches([group], 1))) == 5  # one row is always allowed


def test_microbatches_of_nothing():
    assert list(microbatches([], 16)) == []


# --- vocabulary padding


def test_padded_rows_of_the_head_get_no_probability():
    model = make_model("qwen3", vocab_size=VOCAB + 8)
    assert model.vocab_size == VOCAB
    assert model.module.get_output_embeddings().weight.shape[0] == VOCAB + 8
    groups = ragged_groups((5, (4, 2)))
    torch.testing.assert_close(completion_logprobs(model, groups), oracle(model, groups, vocab=VOCAB), **TOLERANCE)
    # every entry of the tokenizer as a one-token completion: their probabilities sum to 1, nothing is left for the padding
    every = Tokens(groups[0].prompt_ids, tuple((i,) for i in range(VOCAB)))
    assert completion_logprobs(model, [every]).exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("chunk", [None, 3], ids=["one chunk", "chunks"])
def test_a_forward_pass_gives_any_tokens_log_probs_and_the_whole_distribution(tiny_model, monkeypatch, chunk):
    """Against one plain pass over prompt and completion; gradients too, where chunks are recomputed."""
    model, temperature = tiny_model("qwen3-untied"), 0.7
    if chunk:
        monkeypatch.setattr("topd.ops.logprobs.CHUNK_ELEMENTS", chunk * model.vocab_size)
    groups = ragged_groups((4, (7, 3)), (1, (5,)))
    rows = []
    for group in groups:
        for completion in group.completions:
            logits = model.module(torch.tensor([[*group.prompt_ids, *completion]])).logits.float()[0]
            rows.append(torch.log_softmax(logits[len(group.prompt_ids) - 1 : -1, : model.vocab_size] / temperature, dim=-1))
    expected = torch.cat(rows)
    ids = torch.randint(model.vocab_size, (len(expected), 4), generator=torch.Generator().manual_seed(0))
    result = forward(model, groups, temperature=temperature)

    def entropy(logprobs, rows):
        return -(logprobs.exp() * logprobs).sum(-1)

    head = model.module.get_output_embeddings().weight
    for ours, theirs in (
        (result.logprobs_of(ids), expected.gather(-1, ids)),
        (result.over_vocabulary(entropy), entropy(expected, None)),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        gradients = [torch.autograd.grad(x.square().sum(), head, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


def test_log_probs_alone_have_no_vocabulary():
    with pytest.raises(ValueError, match="without the output head"):
        Forward(logprobs=torch.zeros(2)).logprobs_of(torch.zeros(2, 1, dtype=torch.long))
