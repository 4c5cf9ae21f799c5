"""Prompts are what apply_chat_template makes of them, and text of the data never becomes a control token unsaid."""

import dataclasses
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from topd.errors import ConfigError
from topd.tasks.jsonl import Config as JsonlConfig
from topd.tasks.rendering import Rendered, Renderer
from topd.tasks.task import Message, Problem

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
ADDED = {
    "<s>": True,
    "</s>": True,
    "<pad>": True,
    "<|im_start|>": False,
    "<|im_end|>": True,
    "<think>": False,
    "</think>": False,
    "user": False,
    "\n": False,
}


def tokenizer(template: str | None = CHATML, *, ends: bool = False) -> PreTrainedTokenizerFast:
    """Single bytes and a few added tokens; it puts <s> before a text, as Llama's do."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(bytes_to_unicode().values())}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for token, special in ADDED.items():
        inner.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    single = "<s> $A </s>" if ends else "<s> $A"
    special_tokens = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    made.chat_template = template
    return made


def render(problem: Problem | str, chat: str | None = CHATML, *, ends: bool = False, **task: Any) -> Rendered:
    config = JsonlConfig(type="jsonl", path="unused", **task)
    problem = problem if isinstance(problem, Problem) else Problem(question=problem, source="train.jsonl, line 3")
    return Renderer(tokenizer(chat, ends=ends), config)(problem)


def conversation(*turns: str, **fields: Any) -> Problem:
    """A problem whose turns are the user's and the assistant's in turn."""
    messages = tuple(Message(role="assistant" if i % 2 else "user", content=turn) for i, turn in enumerate(turns))
    return Problem(question=turns[-1], messages=messages, source="train.jsonl, line 3", **fields)


HEAD, TAIL = "<s><|im_start|>", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("problem", "task", "text"),
    [
        (Problem(question="3+2?"), {}, f"{HEAD}user\n3+2?{TAIL}"),
        (conversation("3+2?"), {}, f"{HEAD}user\n3+2?{TAIL}"),
        (
            Problem(question="3+2?"),
            {"system_prompt": "Add.", "prompt_suffix": "!"},
            f"{HEAD}system\nAdd.<|im_end|>\n<|im_start|>user\n3+2?!{TAIL}",
        ),
        (
            Problem(question="3", system_prompt="Own."),
            {"system_prompt": "Add."},
            f"{HEAD}system\nOwn.<|im_end|>\n<|im_start|>user\n3{TAIL}",
        ),
        (conversation("3", system_prompt=""), {"system_prompt": "Add."}, f"{HEAD}system\n<|im_end|>\n<|im_start|>user\n3{TAIL}"),
        (Problem(question="3"), {"system_prompt": ""}, f"{HEAD}system\n<|im_end|>\n<|im_start|>user\n3{TAIL}"),
        (
            conversation("1+1", "2", "3+2"),
            {"prompt_suffix": "?"},
            f"{HEAD}user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n3+2?{TAIL}",
        ),
        (
            Problem(question="3"),
            {"template_arguments": {"enable_thinking": False}},
            f"{HEAD}user\n3{TAIL}<think>\n\n</think>\n\n",
        ),
        (Problem(question="a <think> b"), {}, f"{HEAD}user\na <think> b{TAIL}"),
        (Problem(question="user\nor user"), {}, f"{HEAD}user\nuser\nor user{TAIL}"),
    ],
)
def test_a_chat_prompt_is_what_the_template_makes_of_it(problem: Problem, task: dict, text: str) -> None:
    rendered = render(problem, **task)
    assert (rendered.text, rendered.as_given) == (text, False)
    system = task.get("system_prompt") if problem.system_prompt is None else problem.system_prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    turns = problem.messages or [Message(role="user", content=problem.question)]
    messages += [dataclasses.asdict(turn) for turn in turns]
    messages[-1]["content"] += task.get("prompt_suffix", "")
    arguments = task.get("template_arguments", {})
    expected = tokenizer().apply_chat_template(messages, add_generation_prompt=True, **arguments)["input_ids"]
    assert list(rendered.token_ids) == list(expected)
    assert expected.count(tokenizer().bos_token_id) == 1


@pytest.mark.parametrize("template", ["auto", "plain"])
@pytest.mark.parametrize("begin", ["<s><|im_start|>", "<|im_start|>"])
def test_a_prompt_rendered_already_gets_no_second_start_and_no_second_template(template: str, begin: str) -> None:
    expected = render("3+2?").token_ids
    rendered = render(f"{begin}user\n3+2?{TAIL}", template=template)
    assert (rendered.token_ids, rendered.as_given, rendered.unknown) == (expected, True, "")
    assert rendered.text == f"{begin}user\n3+2?{TAIL}"


def test_the_start_token_is_added_only_where_the_templates_own_prompts_have_one() -> None:
    without = CHATML.removeprefix("{{ bos_token }}")
    text = f"<|im_start|>user\n3+2?{TAIL}"
    assert render(text, without).token_ids == render("3+2?", without).token_ids
    assert render(text.replace("<|im_start|>", "<|im_end|>"), None).token_ids[0] == tokenizer().bos_token_id


@pytest.mark.parametrize("ends", [False, True])
def test_plain_text_begins_with_the_start_token_and_has_no_end_token(ends: bool) -> None:
    for chat, task in ((None, {}), (CHATML, {"template": "plain"})):
        rendered = render("3+2", chat, ends=ends, prompt_suffix="=", **task)
        assert rendered.text == "3+2="
        assert rendered.token_ids == (tokenizer().bos_token_id, *(tokenizer().convert_tokens_to_ids(list("3+2="))))


GIVEN = f"<s><|im_start|>user\n3{TAIL}"


@pytest.mark.parametrize(
    ("problem", "chat", "task", "said"),
    [
        ("3", None, {"template": "chat"}, "the tokenizer has no chat template"),
        ("3", None, {"system_prompt": "Add."}, "task.system_prompt needs a chat template, and the tokenizer has none"),
        (
            "3",
            None,
            {"template_arguments": {"a": 1}},
            "task.template_arguments needs a chat template, and the tokenizer has none",
        ),
        ("3", CHATML, {"template": "plain", "template_arguments": {"a": 1}}, 'task.template is "plain"'),
        ("3", CHATML, {"template_arguments": {"enable_thinkin": 1}}, "has no such argument. It reads enable_thinking."),
        (
            "3",
            CHATML,
            {"template_arguments": {"tokenize": False}},
            "task.template_arguments.tokenize: the tokenizer's chat template has no",
        ),
        ("3", DEAF, {"template_arguments": {"x": 1}}, "has no such argument. It reads none."),
        (conversation("3"), None, {}, "line 3: a list of messages needs a chat template, and the tokenizer has none"),
        (
            conversation("3"),
            CHATML,
            {"template": "plain"},
            'a list of messages needs a chat template, and task.template is "plain"',
        ),
        (Problem(question="3", system_prompt="x"), None, {}, "`system_prompt` needs a chat template, and the tokenizer has none"),
        (
            GIVEN,
            CHATML,
            {"template": "chat"},
            'line 3: `prompt` begins with a control token, so it is rendered already, and task.template = "chat"',
        ),
        (GIVEN, CHATML, {"system_prompt": "x"}, "task.system_prompt has no place in it"),
        (GIVEN, CHATML, {"prompt_suffix": "x"}, "task.prompt_suffix has no place in it"),
        (GIVEN, CHATML, {"template_arguments": {"enable_thinking": True}}, "task.template_arguments has no place in it"),
        (Problem(question=GIVEN, system_prompt="x"), CHATML, {}, "`system_prompt` has no place in it"),
        ("[INST] 3 [/INST]", STRICT, {}, "line 3: `prompt` begins with '[INST] ', as the chat template does"),
        ("<s>3+2?", CHATML, {}, "begins with a control token, but not with '<|im_start|>', as the chat template does"),
        ("<|im_end|> means what?", CHATML, {}, "begins with a control token, but not with '<|im_start|>'"),
        (f"{HEAD}user\n3+2?<|im_end|>\n", CHATML, {}, "but holds no '<|im_start|>assistant', after which the model answers"),
        (
            "<|begin_of_text|><|start_header_id|>user",
            CHATML,
            {},
            "begins with '<|begin_of_text|>', so it is rendered for another",
        ),
        ("<start_of_turn>user\n3", CHATML, {}, "begins with '<start_of_turn>', so it is rendered for another model"),
        ("[INST] 3 [/INST]", CHATML, {}, "begins with '[INST]', so it is rendered for another model"),
        ("[INST] 3 [/INST]", None, {}, "begins with '[INST]', so it is rendered for another model"),
        ("what is </s>?", CHATML, {}, "line 3: the user message holds '</s>', which the tokenizer reads as a control token"),
        ("what is </s>?", None, {}, "the user message holds '</s>'"),
        ("what is <pad>?", CHATML, {}, "the user message holds '<pad>'"),
        ("what is <|im_start|>?", CHATML, {}, "the user message holds '<|im_start|>'"),
        ("\n" + GIVEN, CHATML, {}, "the user message holds '<s>'"),
        ("3", CHATML, {"prompt_suffix": "<|im_end|>"}, "the user message holds '<|im_end|>'"),
        ("3", CHATML, {"system_prompt": "</s>"}, "the system message holds '</s>'"),
        (conversation("3", "<|im_end|>", "4"), CHATML, {}, "the assistant message holds '<|im_end|>'"),
        (conversation("<s>3"), CHATML, {}, "the user message holds '<s>'"),
        (Problem(question="3", demonstration="4</s>"), CHATML, {}, "'3': the demonstration holds '</s>'"),
        ("3", STRICT, {"system_prompt": "x"}, "refuses the messages (system, user): roles must alternate user/assistant"),
        (
            conversation("3", "4", "5", "6"),
            DEAF,
            {"template_arguments": {}, "system_prompt": "x"},
            "leaves out or changes the system message 'x'",
        ),
        ("3+2?", DEAF, {"system_prompt": "3"}, "leaves out or changes the system message '3'"),
        ("3", "{{ messages[0].content + 1 }}", {}, "refuses the messages (user): "),
    ],
)
def test_what_would_not_be_what_is_meant_is_an_error(problem: Problem | str, chat: str | None, task: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(problem, chat, **task)
    assert said in str(caught.value)


def test_a_template_may_cut_the_reasoning_of_earlier_answers() -> None:
    cut = "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert render(conversation("1", "<think>2</think>3", "4"), cut).text == "<|im_start|>1<|im_start|>3<|im_start|>4"


def test_marks_of_a_template_are_text_for_a_tokenizer_that_does_not_know_them() -> None:
    assert not render("<|user|> is a mark").as_given
    assert render("[INST] 3", STRICT, template="plain").text == "[INST] 3"
    assert render("<s>3", None).as_given
    assert render("<s>3", template="plain").as_given


def test_a_template_that_takes_no_other_text_is_believed_to_show_it() -> None:
    picky = "{% if messages[0].content != '3' %}{{ raise_exception('not 3') }}{% endif %}<|im_start|>{{ messages[0].content }}"
    assert render("3", picky).text == "<|im_start|>3"


def word_tokenizer(model: models.Model) -> PreTrainedTokenizerFast:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")


VOCAB = {"<pad>": 0, "<unk>": 1, "2": 2, "+": 3}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(models.WordLevel(VOCAB, unk_token="<unk>"), id="unknown token"),
        pytest.param(models.WordLevel(VOCAB, unk_token="<pad>"), id="padding token"),
        pytest.param(models.BPE(vocab=VOCAB, merges=[]), id="dropped"),
    ],
)
def test_characters_that_the_tokenizer_does_not_know_are_reported(model: models.Model) -> None:
    renderer = Renderer(word_tokenizer(model), JsonlConfig(type="jsonl", path="unused"))
    assert renderer(Problem(question="2+2")).unknown == ""
    assert renderer(Problem(question="Was 2+2? as")).unknown.replace(" ", "") == "Was?"
    assert renderer(Problem(question="2", demonstration="2x")).unknown == "x"
    with pytest.raises(ConfigError, match="the tokenizer knows no character of the question 'Was"):
        renderer(Problem(question="Was?"))


def test_unknown_words_are_reported_whole() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    renderer = Renderer(
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"), JsonlConfig(type="jsonl", path="unused")
    )
    assert renderer(Problem(question="cat dog")).unknown == "dog"


def test_characters_of_which_bytes_are_lost_are_reported_and_invisible_ones_are_not() -> None:
    alphabet = [character for byte, character in bytes_to_unicode().items() if byte != "é".encode()[1]]
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.normalizer = tokenizers.normalizers.Replace("\u200b", "")
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=inner), JsonlConfig(type="jsonl", path="unused"))
    assert renderer(Problem(question="a\u200b é ö")).unknown == "é"
