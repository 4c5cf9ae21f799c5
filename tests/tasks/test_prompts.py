"""Rendering, tokenizing, and a stream that is a function of (seed, step)."""

import dataclasses

import pytest

from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.load import load
from topd.tasks.jsonl import Config as JsonlConfig
from topd.tasks.prompts import PromptStream, demonstrate, make_prompts
from topd.tasks.task import Problem
from topd.types import Prompt

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    import torch

    return load("builtin:tiny-student", dtype="float32", device=torch.device("cpu"), role="student")


def task(**changes: object) -> JsonlConfig:
    return JsonlConfig(type="jsonl", path="unused", **changes)


def test_plain_prompts_are_the_question_and_its_suffix(model: LanguageModel) -> None:
    [prompt] = make_prompts([Problem(question="1+2=")], model, task(prompt_suffix="="), name="train", room=8).prompts
    assert prompt.text == "1+2=="
    assert model.tokenizer.decode(prompt.token_ids) == "1+2=="
    assert prompt.id == "train/0"


def test_what_the_model_sees_of_a_prompt_is_kept_beside_it(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    [without] = make_prompts([Problem(question="1+2=")], model, task(), name="train", room=8).prompts
    assert without.text == "1+2="
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    [prompt] = make_prompts([Problem(question="1+2=")], model, task(system_prompt="3+"), name="train", room=8).prompts
    assert prompt.text == "[system]3+[user]1+2=[assistant]"
    assert PromptStream([prompt], per_step=1, seed=0).sha256() != PromptStream([without], per_step=1, seed=0).sha256()


def test_unknown_characters_and_rendered_prompts_are_told(model: LanguageModel) -> None:
    problems = [Problem(question="1+2="), Problem(question="Was ist 2+3?", source="x.jsonl, line 2"), Problem(question="<eos>1")]
    rendered = make_prompts(problems, model, task(), name="train", room=8)
    assert (rendered.unknown, rendered.num_as_given) == ((("x.jsonl, line 2", "Was it?"),), 1)
    unknown, given = rendered.notices("train", too_long_are="left out")
    assert unknown.startswith(
        "1 train problems hold characters that the tokenizer does not know, the first is x.jsonl, line 2: 'Was it?'"
    )
    assert given == "1 train prompts begin with a control token: taken as rendered already"
    assert make_prompts(problems[:1], model, task(), name="train", room=8).notices("train", too_long_are="left out") == []
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 7: the tokenizer knows no character"):
        make_prompts([Problem(question="Was ist?", source="x.jsonl, line 7")], model, task(), name="train", room=8)


def test_long_prompts_are_an_error_or_dropped(model: LanguageModel) -> None:
    problems = [Problem(question="1" * 300), Problem(question="1+2=")]
    with pytest.raises(ConfigError, match=r"train/0: the prompt has 300 tokens; with 8 .* \(256\)"):
        make_prompts(problems, model, task(), name="train", room=8)
    rendered = make_prompts(problems, model, task(max_prompt_tokens=4), name="train", room=model.context_length - 4)
    assert [prompt.text for prompt in rendered.prompts] == ["1+2="]
    assert rendered.too_long == (problems[0],)
    assert rendered.notices("train", too_long_are="left out") == [
        "1 train problems have more than task.max_prompt_tokens tokens: left out"
    ]
    with pytest.raises(ConfigError, match="drops every train prompt"):
        make_prompts(problems, model, task(max_prompt_tokens=1), name="train", room=8)


def test_a_demonstration_ends_with_the_end_token_unless_it_is_cut(model: LanguageModel) -> None:
    [prompt] = make_prompts([Problem(question="1+2=", demonstration="3")], model, task(), name="train", room=8).prompts
    whole, cut = demonstrate(prompt, model, 8), demonstrate(prompt, model, 1)
    assert whole.token_ids[-1] == model.eos_token_ids[0]
    assert (len(whole.token_ids), whole.finish_reason) == (2, "stop")
    assert (len(cut.token_ids), cut.finish_reason) == (1, "length")
    [bare] = make_prompts([Problem(question="1+2=")], model, task(), name="train", room=8).prompts
    with pytest.raises(ConfigError, match="no demonstration"):
        demonstrate(bare, model, 8)


def prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"train/{i}", text="", token_ids=(1,)) for i in range(number)]


def test_the_digest_of_a_stream_holds_the_domains() -> None:
    """With several teachers another domain is another teacher."""
    [plain] = prompts(1)
    digests = {
        PromptStream([dataclasses.replace(plain, domain=domain)], per_step=1, seed=0).sha256() for domain in ("default", "a", "b")
    }
    assert len(digests) == 3


def test_a_pass_shows_every_prompt_once_and_the_next_one_in_another_order() -> None:
    stream = PromptStream(prompts(6), per_step=3, seed=0)
    first, second = ([p.id for step in steps for p in stream.take(step)] for steps in ((1, 2), (3, 4)))
    assert sorted(first) == [f"train/{i}" for i in range(6)]
    assert sorted(second) == [f"train/{i}#1" for i in range(6)]
    assert [name.removesuffix("#1") for name in second] != first


def test_a_batch_larger_than_the_task_has_distinct_ids() -> None:
    taken = PromptStream(prompts(2), per_step=5, seed=0).take(1)
    assert len({prompt.id for prompt in taken}) == 5


def test_the_stream_has_no_memory() -> None:
    one, other = (PromptStream(prompts(6), per_step=4, seed=1) for _ in range(2))
    other.take(1)
    assert one.take(7) == other.take(7)
