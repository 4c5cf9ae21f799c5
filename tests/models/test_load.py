import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes import EOS, KINDS, VOCAB, make_model, make_module, ragged_groups
from topd.config import LoraConfig
from topd.errors import ConfigError
from topd.models.check import check_shared_prefix
from topd.models.load import load, with_adapters, wrap
from topd.models.logprobs import Tokens, completion_logprobs
from topd.models.policy import frozen_copy

CPU = torch.device("cpu")


def read(folder, *, dtype="float32", role="student"):
    return load(str(folder), dtype=dtype, device=CPU, role=role)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_and_is_the_same(kind, model_folder):
    model = read(model_folder(kind))
    assert not model.module.training
    assert model.vocab_size == VOCAB
    assert model.eos_token_ids == (EOS,)
    assert model.context_length == 256
    original = make_module(kind).state_dict()
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, original[name]), name


def test_dtype(model_folder):
    model = read(model_folder(), dtype="bfloat16")
    assert model.module.dtype == torch.bfloat16
    assert not model.sampled_is_trained


# --- what cannot be loaded


def test_missing_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"student\.name = .*nowhere.* is not a folder"):
        read(tmp_path / "nowhere")


def test_unknown_builtin_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"teacher\.name.*does not exist.*builtin:tiny-student"):
        load("builtin:tiny-studnet", dtype="float32", device=CPU, role="teacher")


def test_folder_without_config(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read(tmp_path / "model")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_folder_without_tokenizer(kind, model_folder):
    """transformers makes an empty tokenizer for some architectures, and fails for others."""
    folder = model_folder(kind)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"student\.name.*tokenizer"):
        read(folder)


def test_folder_without_weights(model_folder):
    folder = model_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, -100], ids=["empty", "in the length", "in the header", "in the tensors"])
def test_truncated_weights(keep, model_folder):
    path = model_folder() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"teacher\.name = .* cannot be loaded"):
        read(path.parent, role="teacher")


def test_dropped_tensor_is_not_filled_with_random_numbers(model_folder):
    path = model_folder() / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        read(path.parent)


def test_tensor_of_another_shape(model_folder):
    path = model_folder() / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 32)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"student\.name"):
        read(path.parent)


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_no_end_token(model_folder):
    folder = model_folder(eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="has no end token"):
        read(folder)


def test_end_tokens_of_tokenizer_and_generation_config_are_joined(model_folder):
    folder = model_folder()
    edit_json(folder / "generation_config.json", eos_token_id=[7, EOS, 9])
    assert read(folder).eos_token_ids == (EOS, 7, 9)


def test_pickled_weights_are_not_read(model_folder):
    folder = model_folder()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read(folder)


# --- padded vocabulary


def test_padded_vocabulary(model_folder):
    model = read(model_folder(vocab_size=VOCAB + 24))
    assert model.vocab_size == VOCAB
    every = Tokens((5, 9, 3), tuple((i,) for i in range(VOCAB)))
    assert completion_logprobs(model, [every]).exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert model.output_head()(torch.randn(2, 32)).shape == (2, VOCAB)


# --- the proof at load time


@pytest.mark.parametrize("kind", KINDS)
def test_known_architectures_pass_the_check(kind, tiny_model):
    check_shared_prefix(tiny_model(kind), "student")


def test_a_model_whose_logits_are_transformed_in_an_unknown_way_is_rejected():
    model = make_model("llama")
    original = model.module.forward

    def doubled(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.module.forward = doubled
    with pytest.raises(ConfigError, match=r"teacher: the architecture LlamaForCausalLM cannot be used.*differ by .* on average"):
        check_shared_prefix(model, "teacher")


def test_a_model_that_looks_into_the_future_is_rejected():
    model = make_model("llama")
    original = model.decoder.forward

    def shifted(*args, **kwargs):
        output = original(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(dim=1, keepdim=True)
        return output

    model.decoder.forward = shifted
    with pytest.raises(ConfigError, match="cannot be used"):
        check_shared_prefix(model, "student")


def test_a_model_without_the_expected_interface_is_rejected():
    model = make_model("llama")

    def no_cache(input_ids, attention_mask=None, position_ids=None):
        raise AssertionError("never reached")

    model.decoder.forward = no_cache
    with pytest.raises(ConfigError, match="Error: "):
        check_shared_prefix(model, "student")


def test_a_model_that_gives_nan_is_rejected():
    model = make_model("llama")
    with torch.no_grad():
        model.module.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(ConfigError, match="weights are broken"):
        check_shared_prefix(model, "student")


@pytest.mark.parametrize("settings", [dict(logit_scale=0.25), dict(logits_scaling=4.0)], ids=str)
def test_known_scales_of_logits_are_applied(settings):
    """The scale is read from the configuration: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`."""
    model, scaled = make_model("llama"), make_model("llama", **settings)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(scaled.output_head()(hidden), model.output_head()(hidden) / 4)


# --- adapters and replicas


def test_fresh_adapters_change_nothing_and_only_they_train():
    model = make_model()
    groups = ragged_groups((4, (5, 3)))
    before = completion_logprobs(model, groups).detach()
    adapted = with_adapters(model, LoraConfig(rank=2), seed=0)
    torch.testing.assert_close(completion_logprobs(adapted, groups).detach(), before, atol=1e-6, rtol=1e-6)
    trainable = [name for name, p in adapted.module.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    completion_logprobs(adapted, groups).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in adapted.module.parameters())


def test_adapters_are_a_function_of_the_seed_and_leave_the_global_stream_alone():
    state = torch.get_rng_state()
    one, same, other = (with_adapters(make_model(), LoraConfig(rank=2), seed=seed).module.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name in one if "lora_A" in name)
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_replica_is_frozen_and_separate():
    model = make_model()
    copy = frozen_copy(model, torch.bfloat16)
    assert copy.module.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in copy.module.parameters())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.module.parameters())
    groups = ragged_groups((4, (5, 3)))
    found, expected = completion_logprobs(copy, groups), completion_logprobs(model, groups)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < 0.3


def test_wrap_takes_the_smaller_of_tokenizer_and_embedding(tokenizer):
    assert wrap("small", make_module(vocab_size=20), tokenizer).vocab_size == 20


def test_end_tokens_of_a_model_that_is_not_loaded_are_those_it_would_have(model_folder):
    from transformers import AutoTokenizer, GenerationConfig

    from topd.models.load import end_tokens

    folder = model_folder()
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert end_tokens(str(folder), tokenizer) == (1, 7)
    (folder / "generation_config.json").unlink()
    assert end_tokens(str(folder), tokenizer) == (1,)
