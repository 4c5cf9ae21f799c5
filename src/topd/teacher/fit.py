"""Whether two models know the same tokens and end completions alike."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from topd.models.language_model import LanguageModel
from topd.teacher.teacher import Check

DECODED_AT_ONCE = 512
"""Token ids in one call of `decode`; a difference is then looked for inside."""


def check_vocabulary(student: LanguageModel, teacher: LanguageModel) -> Check:
    """Same tokens with the same ids on both sides; unequal padding of the embedding is allowed."""
    check = check_tokenizer(student, teacher.tokenizer)
    if not check.ok:
        return check
    rows = [model.module.get_input_embeddings().weight.shape[0] for model in (student, teacher)]
    for who, count in zip(("student", "teacher"), rows, strict=True):
        if count < student.vocab_size:
            highest = student.vocab_size - 1
            detail = f"{who} has {count} embedding rows for token ids up to {highest}: the tokenizer is another model's."
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
        detail=f"student has {len(mine)} tokens, teacher {len(others)}; {len(differing)} have no or another id on the other "
        f"side ({some}). The teacher would score other words than were sampled. Use two models with one tokenizer.",
    )


def check_decoding(student: LanguageModel, decode: Callable[[Sequence[int]], str]) -> Check:
    """For a teacher whose tokenizer is elsewhere: every id of the student's must decode to the same text there."""
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
        "score other words than were sampled. Use two models with one tokenizer.",
    )


def end_token_map(student: Sequence[int], teacher: Sequence[int]) -> dict[int, int]:
    """Every end token of the student -> the one the teacher ends with; those that both end with stay."""
    first = teacher[0]
    same_first = student[0] == first
    return {token: token if same_first and token in teacher else first for token in student}


def check_end_tokens(student: LanguageModel, teacher_eos: Sequence[int], map_eos: bool) -> Check:
    """Student and teacher must end completions alike, or `map_eos` must say that one is scored as the other."""
    changed = {mine: theirs for mine, theirs in end_token_map(student.eos_token_ids, teacher_eos).items() if mine != theirs}
    word = student.tokenizer.convert_ids_to_tokens
    if not changed:
        ends = ", ".join(f"{word(token)!r} ({token})" for token in student.eos_token_ids)
        return Check(name="end token", ok=True, detail=f"both end with {ends}")
    pairs = ", ".join(
        f"{word(mine)!r} ({mine}), the teacher with {word(theirs)!r} ({theirs})" for mine, theirs in changed.items()
    )
    if map_eos:
        detail = f"the student ends with {pairs}; scored as the teacher's (teacher.map_eos)"
        return Check(name="end token", ok=True, detail=detail)
    return Check(
        name="end token",
        ok=False,
        detail=f"the student ends with {pairs}. The teacher would punish stopping, and completions would grow without end. Set "
        "teacher.map_eos = true to score one as the other, or fine-tune the student first.",
    )
