import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes import KINDS, VOCAB, make_model, ragged_groups
from topd.config import LoraConfig
from topd.models.export import export, export_untied
from topd.models.load import load, with_adapters
from topd.models.logprobs import completion_logprobs
from topd.models.policy import Policy

IDS = torch.tensor([[5, 9, 3, 22, 7, 7, 31, 12]])


def logits(module):
    with torch.no_grad():
        return module(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_exported_folder_loads_in_plain_transformers_with_equal_logits(kind, tmp_path, tiny_model):
    model = tiny_model(kind)
    export(Policy(model), tmp_path / "model")
    attention = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True, **attention
    )
    assert not any(info.values()), info
    assert torch.equal(logits(again.eval()), logits(model.module))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == VOCAB
    assert tokenizer.eos_token_id == model.eos_token_ids[0]
    assert tokenizer("3+4=")["input_ids"] == model.tokenizer("3+4=")["input_ids"]


def test_export_replaces_an_older_folder_and_leaves_nothing_beside_it(tmp_path):
    for seed in (0, 1):
        export(Policy(make_model(seed=seed)), tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(logits(again.eval()), logits(make_model(seed=1).module))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def trained_adapters(seed=0, **lora):
    """A model with adapters that do something: fresh ones are zero."""
    model = with_adapters(make_model(), LoraConfig(rank=2, **lora), seed=seed)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("lora", [{}, {"target_modules": ["q_proj", "v_proj"], "alpha": 8.0}], ids=["all-linear", "some"])
def test_adapters_are_merged(lora, tmp_path):
    model = trained_adapters(**lora)
    adapted = logits(model.module)
    assert (adapted - logits(make_model().module)).abs().max() > 1e-2
    export(Policy(model), tmp_path / "model")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert not any("lora" in name for name, _ in again.named_parameters())
    torch.testing.assert_close(logits(again.eval()), adapted, atol=1e-5, rtol=1e-5)


def test_export_does_not_touch_the_model_that_trains(tmp_path):
    model = trained_adapters()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    export(Policy(model), tmp_path / "model")
    after = model.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any(p.requires_grad for p in model.module.parameters())


def test_exported_model_is_a_model_of_ours_too(tmp_path):
    model, groups = trained_adapters(), ragged_groups((4, (6, 2)), (1, (3,)))
    export(Policy(model), tmp_path / "model")
    again = load(str(tmp_path / "model"), dtype="float32", device=torch.device("cpu"), role="student")
    torch.testing.assert_close(completion_logprobs(again, groups), completion_logprobs(model, groups), atol=1e-5, rtol=1e-5)


# for a running server


@pytest.mark.parametrize("kind", KINDS)
def test_an_untied_copy_has_equal_logits_and_a_head_of_its_own(kind, tmp_path, tiny_model):
    model = tiny_model(kind)
    export_untied(Policy(model), tmp_path / "model")
    attention = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True, **attention
    )
    assert not any(info.values()), info
    assert torch.equal(logits(again.eval()), logits(model.module))
    assert again.config.tie_word_embeddings is False
    assert again.get_output_embeddings().weight is not again.get_input_embeddings().weight
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == VOCAB


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_an_untied_copy_names_every_weight_as_the_model_does(kind, tmp_path, tiny_model):
    model = tiny_model(kind)
    export_untied(Policy(model), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights.keys() == model.module.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.module.state_dict().items())
    assert torch.equal(weights["lm_head.weight"], model.module.get_output_embeddings().weight)


def test_adapters_are_merged_into_an_untied_copy_and_stay_in_training(tmp_path):
    model = trained_adapters()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    export_untied(Policy(model), tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(again), logits(model.module), atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name in load_file(tmp_path / "model" / "model.safetensors"))
    after = model.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_an_untied_copy_may_be_in_the_servers_precision(tmp_path):
    model = make_model()
    export_untied(Policy(model), tmp_path / "model", torch.bfloat16)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["lm_head.weight"], model.module.get_output_embeddings().weight.to(torch.bfloat16))
    assert model.module.dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_an_untied_copy_replaces_the_one_before(tmp_path):
    for seed in (0, 1):
        export_untied(Policy(make_model(seed=seed)), tmp_path / "handover" / "weights")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "handover" / "weights", dtype=torch.float32)
    assert torch.equal(logits(again.eval()), logits(make_model(seed=1).module))
    assert [path.name for path in (tmp_path / "handover").iterdir()] == ["weights"]
