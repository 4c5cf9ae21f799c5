"""Proof that a teacher's numbers are log-probs of the requested tokens, not only that they never change.

Shifted tokens, another logarithm, an offset or another temperature break a law of log-probs: a prefix has the same numbers alone,
probabilities at one position sum to 1, a temperature divides differences. probe_weights.py compares with the weights themselves.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from topd.endpoint.faults import Fault
from topd.endpoint.served import CANARY_TOLERANCE
from topd.models.language_model import LanguageModel
from topd.models.logprobs import TokenGroup, Tokens, ranked_logprobs
from topd.models.proof import CANARY_TOKENS, make_canary
from topd.teacher.teacher import Check, OneTeacher

CONTEXTS, CONTINUATIONS = 4, 64
"""Number of positions, and of possible next tokens at each (all, in a small vocabulary)."""

CONTEXT_TOKENS = 256
"""Length to which contexts are cut, from the left: every continuation may cost the server this many tokens."""

CUTS = range(5, CANARY_TOKENS, 5)
"""Lengths at which the canary is cut."""

SUM_TOLERANCE = 0.05
"""Allowed error of a sum of probabilities: every continuation may be computed in another batch, in bfloat16."""

EXCESS = 0.3
"""Allowed excess of the sums over 1, relative to the probability of all tokens but the likeliest; noise is far below."""

LEAST_REST = 1e-4
"""Total probability of those tokens below which the excess is not judged: float32 is exact to a hundredth of it."""

USUAL_SHARE, LARGEST_SHARE = 0.9, 0.95
"""Usual teacher probability of the student's likeliest tokens: on average, and at the position where it is largest.
Measured: 0.99 and 1.00 (Qwen2.5-Coder 0.5B and 1.5B, bfloat16, 24 places; the least 0.93)."""

FLAT = 0.03
"""Nats, standard deviation over tokens; below it all tokens have the same number."""

TEMPERATURE_TOLERANCE = 0.02
"""Allowed relative error of the measured temperature."""

LOOK = "Check the server (topd serve and an unmodified vLLM pass), and any proxy in front of it"


def check_numbers(teacher: OneTeacher, student: LanguageModel, groups: Sequence[TokenGroup]) -> Iterator[Check]:
    """Check the laws of log-probs. `groups`: the probe's rollouts, from which contexts are taken."""
    try:
        yield _check_prefixes(teacher, make_canary(student.tokenizer))
        places = continuations(student, groups)
        logprobs = _ask(teacher, places, teacher.temperature)
        yield _check_probabilities(logprobs, vocab_size=student.vocab_size)
        if teacher.temperature != 1:
            yield _check_temperature(_ask(teacher, places, 1.0), logprobs, teacher.temperature)
    except Fault as fault:
        yield Check(name="teacher numbers", ok=False, detail=f"the teacher did not return them: {fault}")


def continuations(student: LanguageModel, groups: Sequence[TokenGroup]) -> list[Tokens]:
    """Contexts with completions of one token, from the student's lowest entropy to its highest."""
    ranked = ranked_logprobs(student, groups, max_tokens=4096, top_k=CONTINUATIONS)
    places = []
    for group, rows in zip(groups, ranked, strict=True):
        for completion, row in zip(group.completions, rows, strict=True):
            entropies = -(row.top_logprobs.exp() * row.top_logprobs).sum(-1)
            for k, entropy in enumerate(entropies.tolist()):
                context = (*group.prompt_ids, *completion[:k])[-CONTEXT_TOKENS:]
                places.append((entropy, Tokens(context, tuple((token,) for token in row.top_ids[k].tolist()))))
    places.sort(key=lambda place: place[0])
    chosen = torch.linspace(0, len(places) - 1, min(CONTEXTS, len(places))).long().tolist()
    return [places[i][1] for i in chosen]


def _ask(teacher: OneTeacher, places: Sequence[Tokens], temperature: float) -> Float[Tensor, "place token"]:
    scores = teacher.log_probs(places, temperature=temperature)
    return torch.stack([torch.cat(parts) for parts in scores])


def _check_prefixes(teacher: OneTeacher, canary: Tokens) -> Check:
    """Tokens have the same numbers without the later tokens, and when the earlier ones belong to the prompt."""
    name, (whole,) = "teacher prefixes", canary.completions
    prefixes = Tokens(canary.prompt_ids, (whole, *(whole[:k] for k in CUTS)))
    alone = [Tokens(canary.prompt_ids + whole[:k], (whole[k : k + 1],)) for k in CUTS]
    [(full, *cut), *singles] = teacher.log_probs([prefixes, *alone], temperature=1.0)  # noise is least there
    ends = torch.stack([part[-1] - full[len(part) - 1] for part in cut]).abs().mean()
    insides = torch.cat([part - full[: len(part)] for part in cut]).abs().mean()
    single = torch.stack([part[0] - full[k] for k, (part,) in zip(CUTS, singles, strict=True)]).abs().mean()
    worst = float(torch.stack([ends, insides, single]).max())
    if worst <= CANARY_TOLERANCE:
        detail = f"the first tokens of a completion have the same log-probs without the later ones, to {worst:.2g} nats"
        return Check(name=name, ok=True, detail=detail)
    return Check(
        name=name,
        ok=False,
        detail="the same tokens after the same text get other log-probs when later tokens are left out, or earlier ones belong "
        f"to the prompt: {worst:.2g} nats on average, {CANARY_TOLERANCE:g} allowed. They are shifted by a position, or depend on "
        f"later tokens. {LOOK}.",
    )


def _check_probabilities(logprobs: Float[Tensor, "place token"], *, vocab_size: int) -> Check:
    """Probabilities of different tokens at one position differ, and sum to at most 1, or to 1 over the whole vocabulary.

    Where a model is sure, the sum is near 1 even with an offset, since log-probs end at 0. So its excess is judged relative to
    the probability of the other tokens.
    """
    name, probabilities, is_all = "teacher probabilities", logprobs.double().exp(), logprobs.shape[1] == vocab_size
    sums = probabilities.sum(-1)
    excess, rest = float((sums - 1).sum()), float((sums - probabilities.amax(-1)).sum())
    least, mean, most = float(sums.min()), float(sums.mean()), float(sums.max())
    count = f"{logprobs.shape[1]} tokens at each of {logprobs.shape[0]} places"
    is_uniform = (logprobs.mean(-1) + math.log(vocab_size)).abs() < FLAT
    if bool(((logprobs.std(-1, correction=0) < FLAT) & ~is_uniform).any()):
        detail = f"of {count}, all at one place have the same log-prob: perhaps that of the token before. {LOOK}."
        return Check(name=name, ok=False, detail=detail)
    if most > 1 + SUM_TOLERANCE or (is_all and least < 1 - SUM_TOLERANCE):
        rule = "the whole vocabulary, so it must be 1" if is_all else "so it must be at most 1"
        return Check(
            name=name,
            ok=False,
            detail=f"the probabilities of {count} sum to {least:.3g} to {most:.3g}; it is one distribution, {rule}. Another "
            f"logarithm than the natural one, an offset, or numbers that are not log-probs. {LOOK}.",
        )
    if rest > LEAST_REST and excess > EXCESS * rest:
        return Check(
            name=name,
            ok=not is_all,
            warning=True,
            detail=f"of {count}, the probabilities sum to more than 1: the excess is {excess / rest:.0%} of what all but the "
            "likeliest have. An offset capped at log-prob 0 looks like this, and so does a softmax in bfloat16. "
            f"{LOOK}.",
        )
    if is_all:
        return Check(name=name, ok=True, detail=f"those of all {count} sum to 1, within {max(most - 1, 1 - least):.2g}")
    detail = f"the student's likeliest {count} have {mean:.2f} of the teacher's probability, {least:.2f} to {most:.2f}"
    if mean >= USUAL_SHARE and most >= LARGEST_SHARE:
        return Check(name=name, ok=True, detail=detail)
    return Check(
        name=name,
        ok=True,
        warning=True,
        detail=f"{detail}; at least {USUAL_SHARE:g} on average and {LARGEST_SHARE:g} at some place are usual. Either teacher and "
        "student differ widely from the first tokens on (another chat template, a teacher that thinks first), or the log-probs "
        "are too low, by an offset or another logarithm. Look at completions of both, and at the server.",
    )


def _check_temperature(at_one: Tensor, at: Tensor, temperature: float) -> Check:
    """Differences of log-probs at one position are those at temperature 1, divided by the temperature."""
    name = "teacher temperature"
    plain, scaled = (part - part.mean(-1, keepdim=True) for part in (at_one, at))
    measured = float(plain.square().sum() / (plain * scaled).sum())
    if abs(measured / temperature - 1) <= TEMPERATURE_TOLERANCE:
        return Check(name=name, ok=True, detail=f"requested {temperature:g}, log-probs are at {measured:.3g}")
    return Check(
        name=name,
        ok=False,
        detail=f"rollout.temperature = {temperature:g} was requested, but the log-probs are at {measured:.3g}: the server "
        "ignores or changes it, and the reward would compare two different distributions. Set rollout.temperature = 1, or fix "
        "the server.",
    )
