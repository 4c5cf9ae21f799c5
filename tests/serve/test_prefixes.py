import random

import pytest

from topd.serve.prefixes import share_prefixes


def put_together(rows, shared):
    """Every row from its parts."""
    found = []
    for row, parts in zip(rows, shared.parts, strict=True):
        tokens = row[:1]
        for group, number in parts:
            assert shared.groups[group].prompt_ids == tokens  # what a part is scored after
            tokens += shared.groups[group].completions[number]
        found.append(tokens)
    return found


def num_tokens(groups):
    return sum(len(g.prompt_ids) - 1 + sum(map(len, g.completions)) for g in groups)


def test_the_example_of_the_docstring():
    shared = share_prefixes([(1, 2, 3, 4), (1, 2, 3, 5)])
    assert [(g.prompt_ids, g.completions) for g in shared.groups] == [((1,), ((2, 3),)), ((1, 2, 3), ((4,), (5,)))]
    assert shared.parts == (((0, 0), (1, 0)), ((0, 0), (1, 1)))


@pytest.mark.parametrize(
    "rows",
    [
        [(1,)],
        [(1,), (1,), (2,)],
        [(1, 2, 3)],
        [(1, 2, 3), (1, 2, 3)],
        [(1, 2, 3), (1, 2), (1,), (1, 2, 3, 4)],
        [(1, 2), (3, 4), (1, 5), (3, 6)],
        [(5, 1), (4, 1), (3, 1)],
    ],
)
def test_every_row_is_found_again(rows):
    assert put_together(rows, share_prefixes(rows)) == rows


def test_random_rows_are_found_again_and_never_cost_much():
    draw = random.Random(0)
    for _ in range(200):
        rows = [tuple(draw.choices((1, 2), k=draw.randint(1, 6))) for _ in range(draw.randint(1, 8))]
        shared = share_prefixes(rows)
        assert put_together(rows, shared) == rows
        assert num_tokens(shared.groups) <= sum(map(len, rows))


def test_a_long_shared_prompt_is_run_twice_not_eight_times():
    prompt = tuple(range(100))
    rows = [(*prompt, 200 + i, 300 + i) for i in range(8)]
    assert num_tokens(share_prefixes(rows).groups) == 2 * 99 + 8 * 2


def test_groups_with_their_own_prompts_stay_groups_although_all_rows_begin_alike():
    rows = [(1, *range(100 * p, 100 * p + 50), 900 + i) for p in (1, 2) for i in range(8)]
    assert num_tokens(share_prefixes(rows).groups) == 2 * (2 * 50 + 8)
    assert put_together(rows, share_prefixes(rows)) == rows


def test_what_three_rows_share_is_run_twice_rather_than_more_of_two():
    """Two share 60 tokens, all three 29: with those 29 as the prefix, 29 tokens less are run than without the third."""
    rows = [(*range(60), 100), (*range(60), 101), (*range(29), 200)]
    assert num_tokens(share_prefixes(rows).groups) == 28 + 28 + 32 + 32 + 1
