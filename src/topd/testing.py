"""Contracts of the parts that can be plugged in, for the tests of their authors: `topd.testing.check("mine.toml")`."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from topd import config_file
from topd.assemble import Parts, assemble
from topd.collect.score import score
from topd.models.logprobs import forward, score_groups
from topd.rollout.engine import Engine, SamplingParams
from topd.tasks.prompts import demonstrate
from topd.teacher.probe_grades import check_gold
from topd.teacher.probe_numbers import check_numbers
from topd.teacher.teacher import OneTeacher, Unscored, broken_scores
from topd.trainer.batch import flatten, make_batches
from topd.types import Prompt, RolloutGroup, ScoredGroup

PROMPTS, COMPLETIONS, TOKENS = 4, 3, 16


def check(config: str | Path | Mapping[str, Any], *overrides: str) -> None:
    """Assemble a configuration and hold its task, grader, engine, teacher and algorithm to their contracts.

    `config`, `overrides`: as for `topd.train`; nothing is written. Raises AssertionError with the broken rule, and ConfigError
    for a configuration that cannot be used.
    """
    with contextlib.closing(assemble(config_file.load(config, overrides))) as parts:
        prompts = list(parts.prompts.prompts[:PROMPTS])
        check_task(parts, prompts)
        groups = check_engine(parts, prompts) if parts.method.samples else _demonstrated(parts, prompts)
        scored = check_teacher(parts, groups)
        check_algorithm(parts, scored)


def check_task(parts: Parts, prompts: Sequence[Prompt]) -> None:
    """Ids are unique, texts are not empty, held-out questions are not trained on, and right answers get full marks."""
    assert len({prompt.id for prompt in parts.prompts.prompts}) == len(parts.prompts.prompts), "prompt ids are not unique"
    assert all(prompt.text and prompt.token_ids for prompt in prompts), "a prompt is empty"
    held_out = {problem.key for benchmark in parts.benchmarks for problem in benchmark.held_out}
    trained = {prompt.problem.key for prompt in parts.prompts.prompts}
    assert not held_out & trained, "a held-out question is trained on"
    for verdict in check_gold(parts.grader, prompts):
        assert verdict.ok, f"{verdict.name}: {verdict.detail}"
        assert not verdict.warning, f"{verdict.name}: {verdict.detail}"


def check_engine(parts: Parts, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """One group per prompt in order, repeatable by seed, with log-probs that are the trainer's within the tolerance it states."""
    engine, counted, announced = parts.engine, [0], list[RolloutGroup]()
    assert isinstance(engine, Engine), "the engine lacks a member of topd.rollout.engine.Engine"
    engine.load_weights(3)
    assert engine.policy_version == 3, "load_weights does not set policy_version"
    params = SamplingParams(n=COMPLETIONS, max_tokens=TOKENS, seed=(0, "contract"))
    groups = engine.generate(
        prompts, params, on_tokens=lambda n: counted.__setitem__(0, counted[0] + n), on_groups=announced.extend
    )
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts], "groups are not in the order of prompts"
    assert all(len(group.rollouts) == COMPLETIONS and group.policy_version == 3 for group in groups), "group size or version"
    assert sorted(g.prompt.id for g in announced) == sorted(p.id for p in prompts), "on_groups must get every group once"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert counted[0] == sum(len(rollout.token_ids) for rollout in rollouts), "on_tokens must add up to the sampled tokens"
    for rollout in rollouts:
        assert 0 < len(rollout.token_ids) <= TOKENS, "a completion is empty or too long"
        assert len(rollout.logprobs) == len(rollout.token_ids), "one log-prob per token"
        ended = rollout.token_ids[-1] in parts.student.eos_token_ids
        assert rollout.finish_reason == ("stop" if ended else "length"), "finish_reason does not fit the last token"
    if engine.exact:
        again = engine.generate(prompts[::-1], params)[::-1]
        assert [g.completions for g in again] == [g.completions for g in groups], "samples depend on more than seed and prompt"
    own = torch.cat([part for parts_ in score_groups(parts.student, groups, max_tokens=4096) for part in parts_])
    off = float((own - torch.cat([rollout.logprobs for rollout in rollouts])).abs().mean())
    allowed = 1e-4 if engine.exact else engine.tolerance or float("inf")
    assert off <= allowed, f"log-probs are off by {off:.2g} nats on average from the trainer's, {allowed:g} allowed"
    return groups


def check_teacher(parts: Parts, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
    """It gives all that the algorithm wants, as log-probs that obey the laws of probability. Returns scored groups."""
    teacher, wanted = parts.teacher if parts.asks_teacher else None, parts.method.wanted
    if teacher is not None:
        assert wanted.streams <= teacher.gives, f"the teacher does not give {sorted(wanted.streams - teacher.gives)}"
        for group, row in zip(groups, teacher.score(groups, wanted), strict=True):
            assert not isinstance(row, Unscored), "a group was not scored"
            assert (broken := broken_scores(group, row)) is None, broken
            assert wanted.streams <= row.tokens.keys(), "a wanted stream is missing"
        if isinstance(teacher, OneTeacher):
            for verdict in check_numbers(teacher, parts.student, groups):
                assert verdict.ok, f"{verdict.name}: {verdict.detail}"
    rows = score(groups, grader=parts.grader, teacher=teacher, wanted=wanted, sampler=None)
    return [row for row in rows if isinstance(row, ScoredGroup)]


def check_algorithm(parts: Parts, groups: Sequence[ScoredGroup]) -> None:
    """Credit and objective are pure, finite and per token; the loss has a gradient through the forward pass."""
    method, evidence = parts.method, flatten(groups)
    before = copy.deepcopy(evidence)
    credit, again = method.credit(evidence), method.credit(evidence)
    for name in ("advantages", "token_rewards", "returns"):
        stream = getattr(credit, name)
        assert stream.shape == (evidence.num_tokens,), f"{name} must have one entry per token"
        assert bool(stream.isfinite().all()), f"{name} is not finite"
        assert torch.equal(stream, getattr(again, name)), f"{name} differs from call to call"
    [batch] = make_batches(
        groups, evidence, credit, weighting=method.weighting, minibatch_prompts=len(groups), epochs=1, seed=(0, "contract")
    )
    weights = batch.streams["weights"]
    assert bool((weights >= 0).all()), "a weight is negative"
    assert abs(float(weights.sum()) - 1) < 1e-5, "the weights of a mini-batch must sum to 1"
    loss, clipped = method.objective(forward(parts.student, batch.groups), batch.streams)
    assert loss.shape == clipped.shape == weights.shape, "the loss must have one entry per token"
    assert clipped.dtype == torch.bool, "clipped must be bool"
    assert bool(loss.isfinite().all()), "the loss is not finite"
    assert loss.requires_grad, "the loss has no gradient"
    for name, stream in before.tokens.items():
        assert torch.equal(stream, evidence[name]), f"credit or objective changed {name}"


def _demonstrated(parts: Parts, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    rollouts = [(prompt, demonstrate(prompt, parts.student, TOKENS)) for prompt in prompts]
    return [RolloutGroup(prompt=prompt, rollouts=(rollout,), policy_version=0) for prompt, rollout in rollouts]
