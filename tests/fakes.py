"""Makers of tiny models, tokenizers and groups. Everything is small, random but seeded, and on the CPU in float32."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from topd.models.language_model import LanguageModel
from topd.models.load import wrap
from topd.models.logprobs import Tokens
from topd.ragged import Ragged
from topd.types import Prompt, Rollout, RolloutGroup, ScoredGroup

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+="
VOCAB = 2 + len(CHARACTERS)
PAD, EOS = 0, 1

SIZE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,  # ten times the usual, so that logits differ enough for a wrong mask or shift to show
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=PAD,
)

WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8)

KINDS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=True)),
    "qwen3-untied": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=False)),
    "llama": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=False)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, WINDOW),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        dict(**WINDOW, final_logit_softcapping=3.0, attn_logit_softcapping=5.0, attn_implementation="eager"),
    ),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `<pad>` 0 and `<eos>` 1; text and ids map one to one."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def make_module(kind: str = "qwen3", *, seed: int = 0, **config: object) -> PreTrainedModel:
    """A model with random weights, norms and biases included, in evaluation mode."""
    module_class, config_class, own = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = module_class(config_class(**{**SIZE, **own, **config})).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def make_model(kind: str = "qwen3", *, seed: int = 0, **config: object) -> LanguageModel:
    """The same, wrapped with the tokenizer."""
    return wrap(f"tiny-{kind}", make_module(kind, seed=seed, **config), make_tokenizer())


def save_folder(folder: Path, kind: str = "qwen3", *, seed: int = 0, **config: object) -> Path:
    """A Hugging Face folder that `topd.models.load.load` reads."""
    make_module(kind, seed=seed, **config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_prompt(token_ids: tuple[int, ...], *, name: str = "train/0", answer: str | None = None) -> Prompt:
    text = "".join(CHARACTERS[i - 2] for i in token_ids)
    return Prompt(id=name, text=text, token_ids=token_ids, answer=answer)


def rollout_group(name: str, prompt_ids: tuple[int, ...], completions: Sequence[tuple[int, ...]]) -> RolloutGroup:
    """A group whose sampled log-probs nobody asks for."""
    rollouts = (Rollout(token_ids=c, logprobs=torch.zeros(len(c)), finish_reason="stop", text="") for c in completions)
    return RolloutGroup(prompt=Prompt(id=name, text="", token_ids=prompt_ids), rollouts=tuple(rollouts), policy_version=0)


def ragged_groups(*shapes: tuple[int, tuple[int, ...]], seed: int = 0) -> list[Tokens]:
    """Groups of random tokens; every shape is (tokens of the prompt, tokens of each completion)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist())

    return [Tokens(draw(prompt), tuple(draw(length) for length in lengths)) for prompt, lengths in shapes]


def plain_logprobs(
    module: PreTrainedModel,
    prompt_ids: tuple[int, ...],
    completion: tuple[int, ...],
    *,
    vocab: int = VOCAB,
    temperature: float = 1.0,
) -> Tensor:
    """The oracle: one whole sequence, no padding, no cache, the model's own logits. With gradient."""
    ids = torch.tensor([[*prompt_ids, *completion]])
    logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1, :vocab]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def scored_groups(*shapes: tuple[int, ...], seed: int = 0) -> list[ScoredGroup]:
    """Groups with random tokens, log-probs and grades; every shape is the tokens of each completion."""
    generator = torch.Generator().manual_seed(seed)
    tokens = ragged_groups(*((3, shape) for shape in shapes), seed=seed)
    return [_scored(i, group, generator) for i, group in enumerate(tokens)]


def _scored(number: int, group: Tokens, generator: torch.Generator) -> ScoredGroup:
    def logprobs() -> tuple[Tensor, ...]:
        return tuple(-2 * torch.rand(len(c), generator=generator) - 0.01 for c in group.completions)

    old = logprobs()
    rollouts = tuple(
        Rollout(token_ids=c, logprobs=part, finish_reason="length", text="")
        for c, part in zip(group.completions, old, strict=True)
    )
    return ScoredGroup(
        group=RolloutGroup(
            prompt=make_prompt(group.prompt_ids, name=f"train/{number}"),
            rollouts=rollouts,
            policy_version=0,
        ),
        evidence=evidence(
            torch.randint(0, 2, (len(rollouts),), generator=generator).float(), behaviour=old, old=old, teacher=logprobs()
        ),
    )


def evidence(grades: Tensor | None = None, **parts: tuple[Tensor, ...] | None) -> Ragged:
    """Of one group: `behaviour`, `old` and `teacher` log-probs, one tensor per completion."""
    given = {f"{name}_logprobs": stream for name, stream in parts.items() if stream is not None}
    shape = Ragged.of([next(iter(given.values()))])
    grades = torch.zeros(len(shape.lengths)) if grades is None else grades
    return replace(shape, tokens={name: torch.cat(stream) for name, stream in given.items()}, rollouts={"grades": grades})


def without_teacher(ragged: Ragged) -> Ragged:
    """The same evidence without a teacher's."""
    return replace(ragged, tokens={name: stream for name, stream in ragged.tokens.items() if name != "teacher_logprobs"})


def credit_input(
    student: list[list[list[float]]], teacher: list[list[list[float]]], grades: list[list[float]] | None = None
) -> Ragged:
    """From nested lists, group by group, completion by completion, token by token."""

    def of_group(i: int) -> Ragged:
        of_rollouts = torch.tensor(grades[i]) if grades else None
        return evidence(of_rollouts, behaviour=tuple(map(torch.tensor, student[i])), teacher=tuple(map(torch.tensor, teacher[i])))

    return Ragged.join([of_group(i) for i in range(len(student))])
