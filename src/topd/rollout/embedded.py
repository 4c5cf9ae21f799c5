"""Stage 2 of 7. Prompt -> RolloutGroup, in this process, on any causal language model.

Before: tasks/prompts.py. After: collect/score.py.

The prompt of a group is run once and its keys and values are copied to the group's rows; finished rows leave the batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from topd.config import Config as RunConfig
from topd.config import EngineConfig
from topd.models.language_model import LanguageModel
from topd.models.logprobs import run_prompts
from topd.models.policy import Policy, frozen_copy
from topd.models.prefix import growing, keep_rows
from topd.rollout.engine import Resources, SamplingParams
from topd.rollout.sampling import sample_tokens
from topd.run.seeding import stream
from topd.types import Prompt, Rollout, RolloutGroup

ROOM = 256
"""Tokens a decode buffer starts with; it doubles when full, so short completions do not pay for a long limit."""

COMPACT_BELOW = 0.8
"""Finished rows are dropped once fewer than this share are alive: copying the cache costs about as much as a decoded token."""


class Config(EngineConfig):
    def rules(self, config: RunConfig) -> Iterator[str]:
        yield from super().rules(config)
        rows = config.rollout.max_concurrent_rollouts
        sizes = {"rollout.group_size": config.rollout.group_size, "eval.samples_per_problem": config.eval.samples_per_problem}
        for key, size in sizes.items():
            if rows < size:
                yield (
                    f"rollout.max_concurrent_rollouts must be >= {key}, as the completions of a prompt are decoded together; "
                    f"found {rows} and {size}. Raise the first or lower the second."
                )


def make(section: Config, *, config: RunConfig, policy: Policy, resources: Resources) -> "EmbeddedEngine":
    """Engine that samples from the policy itself, or from a copy where the precisions differ."""
    if config.student.dtype == "float32":
        sampler = dataclasses.replace(policy.model, autocast_dtype=None)
    else:
        sampler = frozen_copy(policy.model, getattr(torch, config.student.dtype))
    return EmbeddedEngine(sampler, max_concurrent_rollouts=config.rollout.max_concurrent_rollouts, policy=policy)


class EmbeddedEngine:
    """Samples from `model`: the policy's own, a copy in another precision that follows the policy, or one that never trains."""

    kind = "embedded"
    tolerance: float | None = None

    def __init__(self, model: LanguageModel, *, max_concurrent_rollouts: int, policy: Policy | None = None) -> None:
        self.model = model
        self.policy = policy
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.policy_version = 0

    def load_weights(self, policy_version: int) -> None:
        if self.policy is not None:
            self.policy.copy_to(self.model)
        self.policy_version = policy_version

    @property
    def context_length(self) -> int | None:
        return self.model.context_length

    def describe(self) -> str:
        return f"{self.model.name}, in this process"

    @property
    def exact(self) -> bool:
        trained = self.policy.model if self.policy is not None else self.model
        return self.model.sampled_is_trained and trained.sampled_is_trained

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda num_tokens: None,
        on_groups: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    ) -> list[RolloutGroup]:
        per_batch = max(1, self.max_concurrent_rollouts // params.n)  # one group is never cut
        groups: list[RolloutGroup] = []
        for start in range(0, len(prompts), per_batch):
            groups += self._generate_batch(prompts[start : start + per_batch], params, on_tokens)
            on_groups(groups[start:])
        return groups

    def _generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams, on_tokens: Callable[[int], None]
    ) -> list[RolloutGroup]:
        with self.model.autocast():
            token_ids, logprobs, lengths = decode(self.model, prompts, params, on_tokens)
        rows = iter(zip(token_ids, logprobs, lengths.tolist(), strict=True))
        return [
            RolloutGroup(
                prompt=prompt,
                rollouts=tuple(self._rollout(*next(rows)) for _ in range(params.n)),
                policy_version=self.policy_version,
            )
            for prompt in prompts
        ]

    def _rollout(self, token_ids: Tensor, logprobs: Tensor, length: int) -> Rollout:
        tokens = tuple(token_ids[:length].tolist())
        stopped = tokens[-1] in self.model.eos_token_ids
        return Rollout(
            token_ids=tokens,
            logprobs=logprobs[:length].clone(),
            finish_reason="stop" if stopped else "length",
            text=self.model.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True),
        )


def decode(
    model: LanguageModel, prompts: Sequence[Prompt], params: SamplingParams, on_tokens: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [row, max_tokens], their log-probs (float32), and lengths [row]; rows are prompts times n, on the CPU."""
    device, num_rows = model.device, len(prompts) * params.n
    recorded = run_prompts(model, [prompt.token_ids for prompt in prompts])
    prompt_of_row = torch.arange(len(prompts), device=device).repeat_interleave(params.n)
    cache = growing(recorded.cache, prompt_of_row, room=min(ROOM, params.max_tokens))
    uniforms = torch.from_numpy(np.concatenate([_uniforms(prompt, params) for prompt in prompts])).to(device)
    eos = torch.tensor(model.eos_token_ids, device=device)
    to_logits = model.output_head()

    token_ids = torch.zeros(num_rows, params.max_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(num_rows, params.max_tokens, device=device)
    lengths = torch.full((num_rows,), params.max_tokens, device=device)
    alive = torch.arange(num_rows, device=device)  # rows of the decode batch -> rows of the result
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    mask, positions = recorded.mask[prompt_of_row], recorded.lengths[prompt_of_row]
    inputs = torch.tensor([prompt.token_ids[-1] for prompt in prompts], device=device)[prompt_of_row]

    for k in range(params.max_tokens):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        hidden = model.decoder(
            input_ids=inputs[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        inputs, sampled_logprobs = sample_tokens(
            to_logits(hidden), uniforms[alive, k], temperature=params.temperature, top_p=params.top_p
        )
        token_ids[alive, k], logprobs[alive, k] = inputs, sampled_logprobs
        positions = positions + 1
        ends = torch.isin(inputs, eos) & ~finished
        lengths[alive[ends]] = k + 1
        finished = finished | ends
        num_alive = int((~finished).sum())
        on_tokens(num_alive + int(ends.sum()))
        if num_alive == 0:
            break
        if num_alive < COMPACT_BELOW * len(alive):
            kept = (~finished).nonzero().squeeze(-1)
            keep_rows(cache, kept)
            alive, mask, positions, inputs, finished = (x[kept] for x in (alive, mask, positions, inputs, finished))
    return token_ids.cpu(), logprobs.cpu(), lengths.cpu()


def _uniforms(prompt: Prompt, params: SamplingParams) -> np.ndarray:
    """[n, max_tokens] uniform numbers, float32 in [0, 1); every completion has its own stream."""
    streams = [stream(*params.seed, prompt.id, number) for number in range(params.n)]
    return np.stack([one.random(params.max_tokens, dtype=np.float32) for one in streams])
