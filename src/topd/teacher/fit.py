"""Checks that two models have the same tokens and end completions with the same token."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from topd.models.language_model import LanguageModel
from topd.teacher.teacher import Check

DECODED_AT_ONCE = 512
"""Token ids in one call of `decode`; a difference is then located within them."""


def check_vocabulary(student: LanguageModel, teacher: LanguageModel) -> Check:
    """Same tokens with the same ids on both sides; unequal padding of the embedding is allowed."""
    check = check_tokenizer(student, teacher.tokenizer)
    if not check.ok:
        return check
    rows = [model.module.get_input_embeddings().weight.shape[0] for model in (student, teacher)]
    for who, count in zip(("student", "teacher"), rows, strict=True):
        if count < student.vocab_size:
            highest = student.vocab_size - 1
            detail = f"{who} has {count} embedding rows for token ids up to {highest}: the tokenizer belongs to another model."
            return Check(name=check.name, ok=False, detail=detail)
    padded = "" if rows[0] == rows[1] else f"; embedding rows differ ({rows[0]} and {rows[1]}): padding, never sampled"
    return Check(name=check.name, ok=True, detail=check.detail + padded)


def check_tokenizer(student: LanguageModel, theirs: PreTrainedTokenizerBase) -> Check:
    """Same tokens with the same ids."""
    name, mine, others = "vocabulary", student.tokenizer.get_vocab(), theirs.get_vocab()
    differing = [token for token in mine.keys() | others.keys() if mine.get(token) != others.get(token)]
    if not differing:
        return Check(name=name, ok=True, detail=f"{len(mine)} tokens, same ids")
    some = ", ".join(repr(token) for token in sorted(differing)[:3])
    return Check(
        name=name,
        ok=False,
        detail=f"student has {len(mine)} tokens, teacher {len(others)}; {len(differing)} differ in id or exist on one side "
        f"only ({some}). The teacher would score other tokens than were sampled. Use two models with the same tokenizer.",
    )


def check_decoding(student: LanguageModel, decode: Callable[[Sequence[int]], str]) -> Check:
    """Every id of the student's must decode to the same text on a server whose tokenizer files are not available."""
    ids = sorted(student.tokenizer.get_vocab().values())
    differing: list[int] = []
    for start in range(0, len(ids), DECODED_AT_ONCE):
        part = ids[start : start + DECODED_AT_ONCE]
        if student.tokenizer.decode(part) != decode(part):
            differing = [token for token in part if student.tokenizer.decode([token]) != decode([token])] or part
            break
    if not differing:
        return Check(name="vocabulary", ok=True, detail=f"all {len(ids)} tokens decode to the same text on the server")
    mine, theirs = student.tokenizer.decode(differing[:1]), decode(differing[:1])
    return Check(
        name="vocabulary",
        ok=False,
        detail=f"token {differing[0]} is {mine!r} for the student and {theirs!r} for the teacher's server. The teacher would "
        "score other tokens than were sampled. Use two models with the same tokenizer.",
    )


def end_token_map(student: Sequence[int], teacher: Sequence[int]) -> dict[int, int]:
    """Every end token of the student -> the teacher's end token; tokens that both end with stay."""
    first = teacher[0]
    same_first = student[0] == first
    return {token: token if same_first and token in teacher else first for token in student}


def check_end_tokens(student: LanguageModel, teacher_eos: Sequence[int], map_eos: bool) -> Check:
    """Student and teacher must share their end tokens, or `map_eos` must be set, which scores one as the other."""
    changed = {mine: theirs for mine, theirs in end_token_map(student.eos_token_ids, teacher_eos).items() if mine != theirs}
    word = student.tokenizer.convert_ids_to_tokens
    if not changed:
        ends = ", ".join(f"{word(token)!r} ({token})" for token in student.eos_token_ids)
        return Check(name="end token", ok=True, detail=f"both end with {ends}")
    pairs = ", ".join(
        f"{word(mine)!r} ({mine}), the teacher with {word(theirs)!r} ({theirs})" for mine, theirs in changed.items()
    )
    if map_eos:
        detail = f"the student ends with {pairs}; scored as the teacher's (map_eos)"
        return Check(name="end token", ok=True, detail=detail)
    return Check(
        name="end token",
        ok=False,
        detail=f"the student ends with {pairs}. The teacher would punish stopping, so completions would grow without limit. Set "
        "map_eos = true in the teacher's section to score one as the other, or fine-tune the student first.",
    )
