"""The model that is written is the model that was trained, whatever the adapters sit on; else nothing is written."""

import contextlib
import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.tiny import tiny_config
from tests.fakes import make_model, ragged_groups
from topd import config_file
from topd.assemble import assemble, load_policy, make_trainer
from topd.config import LoraConfig
from topd.errors import ConfigError, RunStopped
from topd.loop import run
from topd.models.check import plain_logprobs
from topd.models.export import export, export_untied
from topd.models.load import load, with_adapters
from topd.models.logprobs import Tokens, completion_logprobs
from topd.models.policy import Policy, frozen_copy
from topd.models.proof import TOLERANCE, distance, make_canary, make_probe, probe_logprobs
from topd.rollout.handover import Proof
from topd.run import checkpoint, digests

GROUPS = ragged_groups((5, (9, 2)), (1, (7,)), (12, (20,)))

LORA = {
    "lm_head": dict(target_modules=["lm_head"]),
    "embed_tokens": dict(target_modules=["embed_tokens"]),
    "both": dict(target_modules=["embed_tokens", "lm_head"]),
    "head and queries": dict(target_modules=["q_proj", "lm_head"]),
    "pattern": dict(target_modules=r".*(q_proj|embed_tokens)"),
    "all-linear": dict(),
    "saved head": dict(modules_to_save=["lm_head"]),
    "saved embedding": dict(modules_to_save=["embed_tokens"]),
    "saved both": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "saved norms": dict(modules_to_save=["input_layernorm", "norm"]),
    "rslora": dict(use_rslora=True),
    "rslora on the head": dict(use_rslora=True, target_modules=["lm_head", "v_proj"], modules_to_save=["embed_tokens"]),
}

UNTIED = set(LORA) - {"all-linear", "saved norms", "rslora"}


def trained(name, kind="qwen3"):
    """A model with adapters after a few large updates."""
    model = with_adapters(make_model(kind), LoraConfig(rank=2, **LORA[name]), seed=0)
    weights = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        completion_logprobs(model, GROUPS).mean().neg().backward()
        optimizer.step()
    return model


def logprobs(model):
    with torch.no_grad():
        return completion_logprobs(model, GROUPS)


def read_plainly(folder, model):
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return plain_logprobs(replace(model, module=module, adapter=None), GROUPS)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "gemma3"])
@pytest.mark.parametrize("name", LORA)
def test_what_is_exported_is_what_was_trained(name, kind, tmp_path):
    model = trained(name, kind)
    assert distance(logprobs(model), logprobs(make_model(kind))) > 0.05
    export(Policy(model), tmp_path / "model")
    torch.testing.assert_close(read_plainly(tmp_path / "model", model), logprobs(model), atol=1e-4, rtol=1e-4)
    is_tied = kind != "qwen3-untied" and name not in UNTIED
    assert json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"] is is_tied
    assert model.untied == (kind != "qwen3-untied" and name in UNTIED)
    again = load(str(tmp_path / "model"), dtype="float32", device=torch.device("cpu"), role="student")
    torch.testing.assert_close(logprobs(again), logprobs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LORA)
def test_so_is_what_is_handed_over_and_what_samples_in_another_copy(name, tmp_path):
    model = trained(name)
    export_untied(Policy(model), tmp_path / "handover")
    torch.testing.assert_close(read_plainly(tmp_path / "handover", model), logprobs(model), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logprobs(frozen_copy(model, torch.float32)), logprobs(model))


def test_a_name_of_no_module_is_refused():
    with pytest.raises(ConfigError, match=r"modules_to_save must hold .* found 'lm_haed'\. The model has .*lm_head"):
        with_adapters(make_model(), LoraConfig(modules_to_save=["norm", "lm_haed"]), seed=0)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank():
    layers = [
        with_adapters(make_model(), LoraConfig(rank=4, alpha=8.0, use_rslora=on), seed=0).module.model.layers[0].self_attn.q_proj
        for on in (False, True)
    ]
    assert [layer.scaling["default"] for layer in layers] == [2.0, 4.0]


# --- the proof


def test_the_probe_is_the_canary_and_the_first_tokens_of_prompts(tokenizer):
    canary = make_canary(tokenizer)
    assert make_probe(tokenizer) == [canary]
    _, long, short = make_probe(tokenizer, [tuple(range(40)), (3,), (5, 6)])
    assert (long.prompt_ids, long.completions) == ((0,), (tuple(range(1, 25)),))
    assert (short.prompt_ids, short.completions) == ((5,), ((6,),))


def test_the_probe_is_scored_in_the_precision_of_the_weights():
    model = make_model()
    noisy = replace(model, autocast_dtype=torch.bfloat16)
    torch.testing.assert_close(probe_logprobs(noisy, GROUPS), logprobs(model), atol=1e-5, rtol=1e-5)
    assert distance(logprobs(noisy), logprobs(model)) > 1e-3


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.full((3,), torch.nan)])
def test_what_cannot_be_compared_is_no_match(wrong):
    assert not distance(wrong, torch.zeros(3)) <= TOLERANCE


def without_adapters(policy):
    return copy.deepcopy(policy.model.adapter).unload()


def with_one_tensor_for_both(policy):
    """As a merge into tied layers gives it."""
    module = merge(policy)
    module.get_output_embeddings().weight = module.get_input_embeddings().weight
    module.config.tie_word_embeddings = True
    return module


merge = Policy.merged


@pytest.mark.parametrize("broken", [without_adapters, with_one_tensor_for_both])
def test_an_export_that_is_another_model_is_noticed_and_not_kept(broken, tmp_path, monkeypatch):
    model = trained("lm_head")
    export(Policy(model), tmp_path / "model")
    before = (tmp_path / "model/config.json").read_bytes()
    monkeypatch.setattr(Policy, "merged", broken)
    with pytest.raises(RunStopped, match=r"would not hold the trained model: .* off by .* nats.*--run\.resume true"):
        export(Policy(model), tmp_path / "model")
    assert (tmp_path / "model/config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_server_that_kept_one_tensor_for_both_is_found_out():
    model = trained("lm_head")
    proof = Proof([make_canary(model.tokenizer)], dtype="float32")
    proof.renew(1, proof.numbers(model))
    served = replace(model, module=with_one_tensor_for_both(Policy(model)), adapter=None)
    with pytest.raises(RunStopped, match=r"does not serve the weights of version 1: .*is the output head reloaded"):
        proof.check("http://a", probe_logprobs(served, proof.groups), 1)
    proof.check("http://a", probe_logprobs(replace(model, module=Policy(model).merged(), adapter=None), proof.groups), 1)


def test_an_export_that_cannot_be_loaded_is_noticed(tmp_path, monkeypatch):
    module = make_model().module
    monkeypatch.setattr(module, "save_pretrained", lambda folder: module.config.save_pretrained(folder))
    monkeypatch.setattr(Policy, "merged", lambda policy: module)
    with pytest.raises(RunStopped, match="transformers cannot load it"):
        export(Policy(make_model()), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_whose_export_is_wrong_stops_resumably_and_keeps_its_checkpoint(tmp_path, monkeypatch):
    lora = {"rank": 2, "target_modules": ["lm_head", "q_proj"]}
    tree = tiny_config(tmp_path / "run", student__lora=lora, run__steps=1, eval__max_problems=1, eval__teacher=False)
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "merged", without_adapters)
        with pytest.raises(RunStopped, match="would not hold the trained model"):
            run(config_file.load(tree))
    assert not (tmp_path / "run/model").exists()
    assert not (tmp_path / "run/summary.json").exists()
    [saved] = checkpoint.complete(tmp_path / "run/checkpoints")
    tree["run"]["resume"] = True
    run(config_file.load(tree))
    assert (tmp_path / "run/summary.json").is_file()
    said = json.loads((saved / "state.json").read_text())["probe"]
    groups = [Tokens(tuple(ids[:1]), (tuple(ids[1:]),)) for ids in said["token_ids"]]
    written = load(str(tmp_path / "run/model"), dtype="float32", device=torch.device("cpu"), role="student")
    assert len(groups) == 3
    torch.testing.assert_close(probe_logprobs(written, groups), torch.tensor(said["logprobs"]), atol=1e-4, rtol=1e-4)


def test_with_bfloat16_around_it_the_written_model_is_the_float32_policy(tmp_path):
    tree = tiny_config(tmp_path / "run", student__dtype="bfloat16", trainer__dtype="bfloat16")
    policy = load_policy(config_file.load(tree), torch.device("cpu"))
    export(policy, tmp_path / "model")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert module.dtype == torch.float32
    weights = module.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.module.state_dict().items())


# --- resume


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Of a student with adapters and a head that is trained in full; leave its weights as they were."""
    lora = {"rank": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return make_trainer(assemble(config_file.load(tiny_config(tmp_path_factory.mktemp("trainer") / "run", student__lora=lora))))


def replace_state(saved, state):
    """As if the checkpoint had been saved so: with the digests of what it holds."""
    (saved / "state.json").write_text(json.dumps(state))
    (saved / checkpoint.MARKER).write_text(json.dumps({"sha256": digests.of_folder(saved, but=checkpoint.MARKER)}))


def test_a_resume_on_other_base_weights_is_noticed(tmp_path, trainer, monkeypatch):
    """A checkpoint of adapters holds no more than those; the folder of the student may have changed since."""
    saved = checkpoint.save(
        tmp_path / "c", trainer, steps_done=1, keep=1, probe=make_probe(trainer.policy.model.tokenizer, [(5, 6)])
    )
    stored = json.loads((saved / "state.json").read_text())["probe"]
    assert [len(ids) for ids in stored["token_ids"]] == [25, 2]
    assert len(stored["logprobs"]) == 25
    assert checkpoint.restore(saved, trainer) == 1
    weight = trainer.policy.module.model.layers[0].mlp.up_proj.weight
    monkeypatch.setattr(weight, "data", 1.01 * weight.data)
    with pytest.raises(RunStopped, match=r"step_000001 was restored, but the policy differs from the saved one: .* off by"):
        checkpoint.restore(saved, trainer)
    assert (saved / checkpoint.MARKER).is_file()


@pytest.mark.parametrize(("off", "stops"), [(0.5 * TOLERANCE, False), (2e-4, True), (float("nan"), True)])
def test_a_resume_allows_rounding_and_no_more(off, stops, tmp_path, trainer):
    saved = checkpoint.save(tmp_path / "c", trainer, steps_done=1, keep=1)
    state = json.loads((saved / "state.json").read_text())
    state["probe"]["logprobs"] = [value + off for value in state["probe"]["logprobs"]]
    replace_state(saved, state)
    with pytest.raises(RunStopped, match=r"at most 0\.0001 allowed") if stops else contextlib.nullcontext():
        assert checkpoint.restore(saved, trainer) == 1


def test_a_checkpoint_without_a_probe_is_of_another_version(tmp_path, trainer):
    saved = checkpoint.save(tmp_path / "c", trainer, steps_done=1, keep=1)
    state = json.loads((saved / "state.json").read_text())
    del state["probe"]
    replace_state(saved, state)
    with pytest.raises(ConfigError, match=r"damaged, or another version wrote it: KeyError: 'probe'"):
        checkpoint.restore(saved, trainer)
