"""Positions that depend on the length: every sequence has the log-probs it has alone, in plain transformers."""

import copy
from contextlib import closing
from itertools import chain

import pytest
import torch
import transformers
from transformers.models.mistral import modeling_mistral as mistral

from tests.e2e.tiny import tiny_config
from tests.fakes import EOS, PAD, SIZE, VOCAB, make_prompt, make_tokenizer, plain_logprobs, ragged_groups, save_folder
from topd import config_file
from topd.assemble import assemble, probe, require
from topd.errors import ConfigError
from topd.models.check import borders, check_shared_prefix, crossing
from topd.models.load import load, wrap
from topd.models.logprobs import Tokens, completion_logprobs, ranked_logprobs
from topd.models.policy import frozen_copy
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams

BORDER = 32
TOLERANCE = dict(atol=2e-5, rtol=1e-4)

SHORT_FACTOR, LONG_FACTOR = [1.0] * 4, [4.0] * 4
LONGROPE = dict(rope_type="longrope", short_factor=SHORT_FACTOR, long_factor=LONG_FACTOR, rope_theta=10_000.0)
LAYERS = ["sliding_attention", "full_attention"]

SWITCHING = {
    "phi3": ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=BORDER)),
    "phimoe": (
        "Phimoe",
        dict(
            rope_parameters=dict(LONGROPE, short_mscale=1.0, long_mscale=2.0, original_max_position_embeddings=BORDER),
            num_local_experts=2,
        ),
    ),
    "dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=BORDER)),
    "by layer": (
        "Gemma3Text",
        dict(
            layer_types=LAYERS,
            sliding_window=8,
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
                "full_attention": dict(LONGROPE, original_max_position_embeddings=BORDER),
            },
        ),
    ),
    "dynamic by layer": (
        "Gemma3Text",
        dict(
            layer_types=LAYERS,
            sliding_window=8,
            max_position_embeddings=BORDER,
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
                "full_attention": dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0),
            },
        ),
    ),
}

STATIC = {
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=BORDER),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=BORDER
    ),
    "longrope with one factor": dict(LONGROPE, short_factor=LONG_FACTOR, original_max_position_embeddings=BORDER),
}

WINDOWS = {
    "Mistral": {},
    "Qwen2": dict(use_sliding_window=True, max_window_layers=0),
    "Qwen3": dict(use_sliding_window=True, max_window_layers=0),
    "Gemma2": dict(query_pre_attn_scalar=8),
    "Gemma3Text": dict(query_pre_attn_scalar=8, layer_types=LAYERS),
    "Phi3": {},
    "GptOss": dict(num_local_experts=4),
    "Olmo3": {},
    "Cohere2": {},
    "Gemma3nText": dict(
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        num_hidden_layers=6,
    ),
}

ACROSS = {
    "within": ((20, (12, 3)), (5, (6,))),
    "at the end": ((26, (6,)), (3, (12, 1)), (1, (5,))),
    "short rows beside long": ((30, (2, 1)), (2, (24,)), (3, (2, 9))),
}
"""No sequence is longer than the border; padded rows are."""

BEYOND = {"across": ((20, (20, 3)), (3, (2,))), "beyond": ((40, (12,)), (2, (30, 1)), (BORDER, (1,)))}


def module_of(kind, **settings):
    size = {**SIZE, "max_position_embeddings": 256, **settings}
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


def model_of(kind, **settings):
    return wrap(kind, module_of(kind, **settings), make_tokenizer())


def plain(kind, settings, groups):
    """By a module that topd has never seen, one for every sequence: a dynamic one remembers what it was asked."""
    parts = [
        plain_logprobs(module_of(kind, **settings), group.prompt_ids, completion)
        for group in groups
        for completion in group.completions
    ]
    return torch.cat(parts).detach()


@pytest.mark.parametrize("batch", ACROSS)
@pytest.mark.parametrize("name", SWITCHING)
def test_company_changes_nothing_and_every_sequence_is_that_of_plain_transformers(name, batch):
    kind, settings = SWITCHING[name]
    model, groups = model_of(kind, **settings), ragged_groups(*ACROSS[batch])
    assert model.context_length == BORDER
    expected = plain(kind, settings, groups)
    torch.testing.assert_close(completion_logprobs(model, groups).detach(), expected, **TOLERANCE)
    alone = torch.cat([completion_logprobs(model, [group]).detach() for group in groups])
    torch.testing.assert_close(alone, expected, **TOLERANCE)
    copied = completion_logprobs(frozen_copy(model, torch.float32), groups)
    torch.testing.assert_close(copied, expected, **TOLERANCE)


@pytest.mark.parametrize("name", SWITCHING)
def test_the_models_of_these_tests_do_switch(name):
    """By far more than rounding, in plain transformers, between a row alone and the same row beside a long one."""
    kind, settings = SWITCHING[name]
    [group] = ragged_groups((20, (8,)))
    ids = torch.tensor([[*group.prompt_ids, *group.completions[0]] + [PAD] * 30] * 2)
    positions = torch.arange(58).expand(2, 58)
    logits = module_of(kind, **settings)(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 19:27, :VOCAB]
    beside = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(group.completions[0])[:, None]).squeeze(-1)
    assert float((beside - plain(kind, settings, [group])).abs().mean().detach()) > 0.01


@pytest.mark.parametrize("name", SWITCHING)
def test_sampled_log_probs_are_those_of_plain_transformers(name):
    """Up to the last token that fits, with prompts of different length in one batch."""
    kind, settings = SWITCHING[name]
    engine = EmbeddedEngine(model_of(kind, **settings), max_concurrent_rollouts=8)
    prompts = [make_prompt(group.prompt_ids, name=f"train/{i}") for i, group in enumerate(ragged_groups((24, (1,)), (2, (1,))))]
    sampled = engine.generate(prompts, SamplingParams(n=2, max_tokens=8, temperature=1.0, seed=(0,)))
    groups = [Tokens(group.prompt_ids, group.completions) for group in sampled]
    found = torch.cat([rollout.logprobs for group in sampled for rollout in group.rollouts])
    torch.testing.assert_close(found, plain(kind, settings, groups), **TOLERANCE)


@pytest.mark.parametrize("score", [completion_logprobs, lambda *args: ranked_logprobs(*args, max_tokens=99, top_k=1)])
def test_a_longer_sequence_is_refused_with_reason_and_remedy(score):
    model = model_of("Phi3", **SWITCHING["phi3"][1])
    with pytest.raises(ConfigError, match=r"33 tokens, Phi3 takes 32\. Its rotary scaling \(longrope\) changes beyond 32 tokens"):
        score(model, ragged_groups((2, (1,)), (20, (13, 2))))
    assert "short_factor = long_factor" in model.context_note
    assert 'rope_type, as "yarn"' in model_of("Llama", **SWITCHING["dynamic"][1]).context_note


@pytest.mark.parametrize("batch", BEYOND)
@pytest.mark.parametrize("name", STATIC)
def test_factors_that_never_switch_have_the_whole_context(name, batch):
    kind = "Phi3" if "longrope" in name else "Llama"
    settings = dict(rope_parameters=STATIC[name])
    model, groups = model_of(kind, **settings), ragged_groups(*BEYOND[batch])
    assert (model.context_length, model.context_note) == (256, "")
    torch.testing.assert_close(completion_logprobs(model, groups).detach(), plain(kind, settings, groups), **TOLERANCE)
    check_shared_prefix(model, "student")


@pytest.mark.parametrize("kind", WINDOWS)
def test_models_with_windows_equal_plain_transformers_beyond_them(kind):
    settings = dict(sliding_window=BORDER, **WINDOWS[kind])
    model, groups = model_of(kind, **settings), ragged_groups((100, (9, 3)), (20, (25,)), (3, (2,)))
    torch.testing.assert_close(completion_logprobs(model, groups).detach(), plain(kind, settings, groups), **TOLERANCE)
    assert borders(model) == {BORDER: "sliding_window"}
    check_shared_prefix(model, "student")


# --- the proof at load time


@pytest.mark.parametrize("name", SWITCHING)
def test_a_switching_model_passes_the_check_only_because_its_factors_are_held(name):
    kind, settings = SWITCHING[name]
    model = model_of(kind, **settings)
    assert BORDER in borders(model)
    check_shared_prefix(model, "student")
    for part in model.module.modules():
        if hasattr(part, "rope_type"):
            part._forward_pre_hooks.clear()
    with pytest.raises(ConfigError, match=r"student: the architecture .* Its log-probs around 32 tokens .* differ by"):
        check_shared_prefix(model, "student")


def test_a_saved_model_is_loaded_with_its_factors_held(tmp_path):
    kind, settings = SWITCHING["phi3"]
    module_of(kind, **settings).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = load(str(tmp_path), dtype="float32", device=torch.device("cpu"), role="teacher")
    groups = ragged_groups(*ACROSS["at the end"])
    assert model.context_length == BORDER
    torch.testing.assert_close(completion_logprobs(model, groups).detach(), plain(kind, settings, groups), **TOLERANCE)


@pytest.mark.parametrize("second_pass", [False, True])
def test_a_window_that_one_pass_of_the_shared_prefix_forgets_is_noticed(second_pass, monkeypatch):
    """The small probe is shorter than the window, so only the rows beyond the border can tell."""
    kept = mistral.create_sliding_window_causal_mask

    def forgets(*args, **kwargs):
        cache = kwargs["past_key_values"]
        wrong = cache is not None and (cache.get_seq_length() > 0) == second_pass
        return (mistral.create_causal_mask if wrong else kept)(*args, **kwargs)

    monkeypatch.setattr(mistral, "create_sliding_window_causal_mask", forgets)
    with pytest.raises(ConfigError, match=r"around 32 tokens \(sliding_window\) differ by"):
        check_shared_prefix(model_of("Mistral", sliding_window=BORDER, num_hidden_layers=6), "student")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_run_that_would_go_beyond_says_why_it_cannot(role, tmp_path):
    kind, settings = SWITCHING["phi3"]
    module_of(kind, **settings).save_pretrained(tmp_path / "phi3")
    make_tokenizer().save_pretrained(tmp_path / "phi3")
    names = {"student": save_folder(tmp_path / "other"), "teacher": save_folder(tmp_path / "other"), role: tmp_path / "phi3"}
    changes = {f"{key}__name": str(name) for key, name in names.items()}

    tree = tiny_config(tmp_path / "run", **changes, rollout__max_completion_tokens=30)
    tree["task"]["template"] = "plain"
    with (
        pytest.raises(
            ConfigError, match=r"Lower rollout\.max_completion_tokens.* Its rotary scaling \(longrope\) changes beyond 32"
        ),
        closing(assemble(config_file.load(tree))) as parts,
    ):
        require(probe(parts))


def test_borders_are_found_wherever_the_configuration_names_them():
    model = model_of("Llama", rope_parameters=STATIC["llama3"], attention_chunk_size=64, max_window_layers=28, use_window=True)
    model.module.config.by_layer = [{"window_size": [None, 128]}, {"window_size": 100_000}]
    assert borders(model) == {32: "original_max_position_embeddings", 64: "attention_chunk_size", 128: "window_size"}
    assert borders(model_of("Llama")) == {}


@pytest.mark.parametrize(("border", "context"), [(32, 256), (32, 32), (14, 16), (250, 256)])
def test_a_crossing_has_rows_on_both_sides_and_never_leaves_the_context(border, context):
    shapes = crossing(border, context)
    ends = [prompt + length for prompt, completions in shapes for length in completions]
    assert max(ends) <= context
    assert min(prompt for prompt, _ in shapes) > 0
    padded = max(prompt for prompt, _ in shapes) + max(chain(*(completions for _, completions in shapes)))
    assert padded > border
    if context > border + 6:
        assert any(prompt < border < prompt + length for prompt, completions in shapes for length in completions)
        assert any(prompt > border for prompt, _ in shapes)
        assert any(end < border for end in ends)


def test_a_border_beyond_the_means_is_named_and_not_crossed(monkeypatch, capsys):
    model = model_of("Mistral", sliding_window=BORDER)
    monkeypatch.setattr("topd.models.check.MAX_COST", {"cpu": 1e3})
    check_shared_prefix(model, "teacher")
    assert capsys.readouterr().err == (
        "teacher: log-probs around 32 tokens (sliding_window in its config.json) are not proven: too costly on cpu\n"
    )


def test_only_the_layers_that_a_border_needs_are_asked(monkeypatch):
    model = model_of("Mistral", sliding_window=BORDER, num_hidden_layers=6)
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda part, args, output: seen.append((part.self_attn.layer_idx, args[0].shape[1])))
    check_shared_prefix(model, "student")
    assert {layer for layer, length in seen if length > BORDER} == {0, 1}
    assert {layer for layer, length in seen} == set(range(6))
    assert (len(model.decoder.layers), model.num_layers) == (6, 6)
    assert model.eos_token_ids == (EOS,)
