"""Rendering, tokenizing, and a stream that is a function of (seed, step)."""

import pytest

from topd.config import JsonlConfig
from topd.errors import ConfigError
from topd.models.language_model import LanguageModel
from topd.models.load import load
from topd.tasks.prompts import PromptStream, demonstrate, make_prompts, render
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


def test_the_chat_template_is_used_where_there_is_one(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(question="1+2=")
    with pytest.raises(ConfigError, match="no chat template"):
        render(problem, model.tokenizer, task(template="chat"))
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    assert render(problem, model.tokenizer, task()) == "[user]1+2=[assistant]"
    assert render(problem, model.tokenizer, task(system_prompt="Add.")) == "[system]Add.[user]1+2=[assistant]"
    assert render(problem, model.tokenizer, task(template="plain")) == "1+2="


def test_long_prompts_are_an_error_or_dropped(model: LanguageModel) -> None:
    problems = [Problem(question="1" * 300), Problem(question="1+2=")]
    with pytest.raises(ConfigError, match=r"train/0 has 300 tokens; with 8 .* \(256\)"):
        make_prompts(problems, model, task(), name="train", room=8)
    [kept] = make_prompts(problems, model, task(max_prompt_tokens=10), name="train", room=8).prompts
    assert kept.text == "1+2="
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
