import dataclasses

import pytest
import torch

from tests.fakes import EOS, KINDS, VOCAB, make_model, make_prompt
from topd.models.logprobs import Tokens, completion_logprobs
from topd.models.policy import Policy, frozen_copy
from topd.rollout import embedded
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams

TOLERANCE = dict(atol=1e-5, rtol=1e-5)

PROMPTS = [
    make_prompt((5, 9, 3, 22, 7), name="train/0"),
    make_prompt((11,), name="train/1"),
    make_prompt((30, 8, 8, 2, 14, 6, 19, 25, 3, 12, 4), name="train/2"),
    make_prompt((4, 4), name="train/3"),
]


def params(**changes):
    return SamplingParams(**{"n": 4, "max_tokens": 24, "seed": (0, "rollout", 1), **changes})


def generate(model, prompts=PROMPTS, rows=64, **changes):
    return EmbeddedEngine(model, max_concurrent_rollouts=rows).generate(prompts, params(**changes))


@pytest.fixture(scope="session")
def ending_model():
    """(kind) -> a model that likes to end, so that completions have many lengths."""
    made = {}

    def get(kind="qwen3"):
        if kind not in made:
            made[kind] = make_model(kind, tie_word_embeddings=False)
            head = made[kind].module.get_output_embeddings()
            with torch.no_grad():
                head.weight[EOS] *= 0.1  # logits around 0 for the end token, and smaller ones for the others
                head.weight *= 0.3
        return made[kind]

    return get


def assert_same(found, expected):
    assert [g.prompt for g in found] == [g.prompt for g in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.completions == other.completions
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            assert (a.finish_reason, a.text) == (b.finish_reason, b.text)
            torch.testing.assert_close(a.logprobs, b.logprobs, **TOLERANCE)


def lengths(groups):
    return [len(c) for g in groups for c in g.completions]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_p": 0.7}], ids=["plain", "temperature", "top_p"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logprobs_are_the_trainers(kind, settings, ending_model):
    model = ending_model(kind)
    groups = generate(model, n=8, **settings)
    assert len(set(lengths(groups))) > 3
    with torch.no_grad():
        expected = completion_logprobs(model, groups, temperature=settings.get("temperature", 1.0))
    found = torch.cat([rollout.logprobs for group in groups for rollout in group.rollouts])
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind, ending_model):
    model = ending_model(kind)
    for group in generate(model, n=1, temperature=0.0):
        ids = torch.tensor([group.prompt_ids])
        with torch.no_grad():
            expected = model.module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=EOS, pad_token_id=0
            )
        assert group.completions == (tuple(expected[0, ids.shape[1] :].tolist()),)


def test_greedy_rollouts_of_a_group_are_equal(ending_model):
    for group in generate(ending_model(), n=3, temperature=0.0):
        assert len(set(group.completions)) == 1


@pytest.mark.parametrize("rows", [1, 4, 8, 12, 1000])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_number_of_concurrent_rollouts_changes_nothing(kind, rows, ending_model):
    model = ending_model(kind)
    assert_same(generate(model, rows=rows), generate(model))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_prompts_change_nothing(kind, ending_model):
    model = ending_model(kind)
    together = generate(model)
    assert_same(generate(model, PROMPTS[::-1]), together[::-1])
    for prompt, group in zip(PROMPTS, together, strict=True):
        assert_same(generate(model, [prompt]), [group])


def test_a_longer_group_starts_with_the_shorter_one(ending_model):
    """A completion depends on its number in the group, not on the size of the group."""
    few, many = generate(ending_model(), n=2), generate(ending_model(), n=5)
    for short, long in zip(few, many, strict=True):
        assert long.completions[:2] == short.completions


def test_same_seed_same_tokens_another_seed_others(ending_model):
    model = ending_model()
    assert_same(generate(model), generate(model))
    assert [g.completions for g in generate(model, seed=(0, "rollout", 2))] != [g.completions for g in generate(model)]


def test_prompts_with_equal_tokens_but_other_names_are_sampled_independently(ending_model):
    twins = [make_prompt((5, 9, 3), name="a"), make_prompt((5, 9, 3), name="b")]
    one, other = generate(ending_model(), twins)
    assert one.completions != other.completions


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["never", "half", "at once"])
@pytest.mark.parametrize("room", [1, 3, 256])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_dropping_rows_and_growing_buffers_change_nothing(kind, room, share, ending_model, monkeypatch):
    model = ending_model(kind)
    expected = generate(model)
    monkeypatch.setattr(embedded, "ROOM", room)
    monkeypatch.setattr(embedded, "COMPACT_BELOW", share)
    assert_same(generate(model), expected)


def test_finished_rows_leave_the_batch(ending_model):
    model = ending_model()
    rows = []
    handle = model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        groups = generate(model)
    finally:
        handle.remove()
    decoded = rows[1:]  # the first pass is the prompts'
    assert rows[0] == len(PROMPTS)
    assert decoded[0] == 16
    assert decoded == sorted(decoded, reverse=True)
    assert decoded[-1] < 16
    assert len(decoded) == max(lengths(groups))
    for step, num_rows in enumerate(decoded):
        alive = sum(length > step for length in lengths(groups))
        assert alive <= num_rows <= alive / embedded.COMPACT_BELOW + 1


def test_end_token_is_kept_and_truncation_is_named(ending_model):
    model = ending_model()
    rollouts = [rollout for group in generate(model, n=8, max_tokens=12) for rollout in group.rollouts]
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        assert EOS not in rollout.token_ids[:-1]
        assert len(rollout.token_ids) == len(rollout.logprobs) <= 12
        if rollout.finish_reason == "stop":
            assert rollout.token_ids[-1] == EOS
            shown = rollout.token_ids[:-1]
        else:
            assert len(rollout.token_ids) == 12
            assert rollout.token_ids[-1] != EOS
            shown = rollout.token_ids
        assert "<eos>" not in rollout.text
        assert len(rollout.text) == sum(token >= 2 for token in shown)


def test_end_token_on_the_last_allowed_position_is_a_stop(ending_model):
    """The first completion of a group draws the same numbers whatever the limit."""
    model = ending_model()
    many = [make_prompt((5, 9, 3), name=f"train/{i}") for i in range(20)]
    group = next(g for g in generate(model, many, n=1) if g.rollouts[0].finish_reason == "stop" and len(g.completions[0]) > 2)
    length = len(group.completions[0])
    assert_same(generate(model, [group.prompt], n=1, max_tokens=length), [group])
    (cut,) = generate(model, [group.prompt], n=1, max_tokens=length - 1)
    assert cut.completions[0] == group.completions[0][:-1]
    assert cut.rollouts[0].finish_reason == "length"


def test_one_token_limit(ending_model):
    for group in generate(ending_model(), max_tokens=1, n=8):
        for rollout in group.rollouts:
            assert len(rollout.token_ids) == 1
            assert rollout.finish_reason == ("stop" if rollout.token_ids == (EOS,) else "length")


def test_other_end_tokens_stop_too(ending_model):
    model = dataclasses.replace(ending_model(), eos_token_ids=(EOS, 7, 8, 9))
    rollouts = [rollout for group in generate(model, n=8) for rollout in group.rollouts]
    assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} > {EOS}
    assert not any({EOS, 7, 8, 9} & set(r.token_ids[:-1]) for r in rollouts)


def test_tokens_are_counted_as_they_come(ending_model):
    told = []
    engine = EmbeddedEngine(ending_model(), max_concurrent_rollouts=8)
    groups = engine.generate(PROMPTS, params(), on_tokens=told.append)
    assert sum(told) == sum(lengths(groups))


def test_padded_vocabulary_is_never_sampled():
    model = make_model("qwen3", vocab_size=VOCAB + 40)
    groups = generate(model, n=8, temperature=3.0, max_tokens=16)
    assert max(token for group in groups for c in group.completions for token in c) < VOCAB


def test_frequencies_of_the_first_token_follow_the_model(ending_model):
    model = ending_model()
    (group,) = generate(model, PROMPTS[:1], n=4000, max_tokens=1, rows=4000)
    found = torch.bincount(torch.tensor([c[0] for c in group.completions]), minlength=VOCAB) / 4000
    every = Tokens(PROMPTS[0].token_ids, tuple((i,) for i in range(VOCAB)))
    with torch.no_grad():
        expected = completion_logprobs(model, [every]).exp()
    assert ((found - expected).abs() < 5 * (expected / 4000).sqrt() + 1e-3).all()


def test_no_gradient_is_recorded(ending_model):
    (group,) = generate(ending_model(), PROMPTS[:1])
    assert not any(rollout.logprobs.requires_grad for rollout in group.rollouts)


# --- weights


def test_policy_version_is_that_of_the_weights(ending_model):
    engine = EmbeddedEngine(ending_model(), max_concurrent_rollouts=64)
    assert {g.policy_version for g in engine.generate(PROMPTS, params())} == {0}
    engine.load_weights(3)
    assert {g.policy_version for g in engine.generate(PROMPTS, params())} == {3}


def test_a_replica_takes_over_the_policys_weights():
    policy = make_model("qwen3")
    copied = frozen_copy(policy, torch.float32)
    engine = EmbeddedEngine(copied, max_concurrent_rollouts=64, policy=Policy(policy))
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    before = engine.generate(PROMPTS, params())
    engine.load_weights(1)
    after = engine.generate(PROMPTS, params())
    assert [g.completions for g in before] != [g.completions for g in after]
    expected = generate(policy)
    assert [g.completions for g in after] == [g.completions for g in expected]
    assert {g.policy_version for g in after} == {1}


def test_every_group_is_told_of_once_as_its_batch_is_done(ending_model):
    told = []
    engine = EmbeddedEngine(ending_model(), max_concurrent_rollouts=8)
    groups = engine.generate(PROMPTS, params(), on_groups=lambda done: told.append([group.prompt.id for group in done]))
    assert told == [["train/0", "train/1"], ["train/2", "train/3"]]
    assert [group.prompt.id for group in groups] == [name for names in told for name in names]


@pytest.mark.parametrize("sampled", [None, torch.bfloat16], ids=["policy float32", "policy bfloat16"])
@pytest.mark.parametrize("copied", [torch.float32, torch.bfloat16], ids=["copy float32", "copy bfloat16"])
def test_log_probs_are_recomputed_unless_both_models_are_exact(sampled, copied):
    policy = dataclasses.replace(make_model(), autocast_dtype=sampled)
    engine = EmbeddedEngine(frozen_copy(policy, copied), max_concurrent_rollouts=8, policy=Policy(policy))
    exact = sampled is None and copied is torch.float32
    assert engine.exact is exact
