import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.advantage import normalize_over_rollouts, normalize_over_tokens, segment_mean_std

segments = st.lists(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8), min_size=1, max_size=5)


def flat(parts):
    return torch.tensor([x for part in parts for x in part]), torch.tensor([len(part) for part in parts])


def loop(parts, std_floor):
    found = []
    for part in parts:
        mean = statistics.fmean(part)
        std = statistics.stdev(part) if len(part) > 1 else 0.0
        found += [(x - mean) / max(std, std_floor) for x in part]
    return torch.tensor(found)


def test_literal():
    # mean 2, squared deviations 1 + 0 + 1, unbiased variance 2 / 2 = 1  |  mean 15, variance (25 + 25) / 1 = 50
    found = normalize_over_tokens(torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0]), torch.tensor([3, 2]), std_floor=1e-6)
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0, -5 / 50**0.5, 5 / 50**0.5]))


@given(segments, st.sampled_from([1e-6, 1e-2, 1.0]))
def test_equals_the_loop(parts, std_floor):
    found = normalize_over_tokens(*flat(parts), std_floor=std_floor)
    torch.testing.assert_close(found, loop(parts, std_floor).float(), atol=1e-4, rtol=1e-5)


@given(segments)
def test_mean_zero_and_std_one_within_every_segment(parts):
    values, counts = flat(parts)
    for part, source in zip(
        normalize_over_tokens(values, counts, std_floor=1e-6).split(counts.tolist()), values.split(counts.tolist()), strict=True
    ):
        assert part.double().mean().item() == pytest.approx(0, abs=1e-5)
        if len(part) > 1 and source.double().std() > 1e-3:
            assert part.double().std().item() == pytest.approx(1, abs=1e-5)


@given(segments, st.floats(-10, 10), st.floats(0.1, 10))
def test_shift_and_scale_do_not_matter(parts, shift, scale):
    values, counts = flat(parts)
    values = values.double()
    _, std = segment_mean_std(values, counts)
    if ((std > 0) & (std < 1e-2)).any():
        return
    expected = normalize_over_tokens(values, counts, std_floor=1e-9)
    found = normalize_over_tokens(scale * values + shift, counts, std_floor=1e-9)
    equal_parts = torch.repeat_interleave(std == 0, counts)  # there, rounding of the shift may be blown up by the tiny floor
    torch.testing.assert_close(found[~equal_parts], expected[~equal_parts], atol=1e-8, rtol=1e-8)


@given(segments)
def test_other_segments_do_not_matter(parts):
    alone = torch.cat([normalize_over_tokens(*flat([part]), std_floor=1e-6) for part in parts])
    assert torch.equal(normalize_over_tokens(*flat(parts), std_floor=1e-6), alone)


@pytest.mark.parametrize(
    ("values", "counts"),
    [([3.5], [1]), ([2.0, 2.0, 2.0], [3]), ([0.0] * 4, [2, 2]), ([7.0, 1.0, 1.0], [1, 2])],
    ids=["one token", "equal", "zeros", "both"],
)
def test_segments_without_spread_give_zeros(values, counts):
    found = normalize_over_tokens(torch.tensor(values), torch.tensor(counts), std_floor=1e-6)
    assert found.tolist() == [0.0] * len(values)


def test_floor_limits_the_gain():
    # std of (-1e-8, 1e-8) is 1.414e-8, far below the floor: divided by 1e-6 instead
    found = normalize_over_tokens(torch.tensor([-1e-8, 1e-8]), torch.tensor([2]), std_floor=1e-6)
    torch.testing.assert_close(found, torch.tensor([-1e-2, 1e-2]))


def test_large_common_offset_does_not_cancel_the_spread():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + 1e9
    mean, std = segment_mean_std(values, torch.tensor([3]))
    assert mean.item() == pytest.approx(1e9 + 2)
    assert std.item() == pytest.approx(1.0, abs=1e-6)


def test_mean_and_std_literals():
    mean, std = segment_mean_std(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 1]))
    assert mean.tolist() == [2.0, 5.0]
    assert std.tolist() == pytest.approx([2**0.5, 0.0])  # ((1 - 2)^2 + (3 - 2)^2) / 1; a single value has none
    assert mean.dtype == std.dtype == torch.float64


def test_over_rollouts_is_one_vote_per_completion():
    # group 1: mean 0.25, variance (3 * 0.0625 + 0.5625) / 3 = 0.25  |  group 2: equal rewards
    found = normalize_over_rollouts(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([4, 2]), std_floor=1e-6)
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dtype_is_kept_and_inputs_are_unchanged(dtype):
    values, counts = torch.tensor([1.0, 2.0, 4.0], dtype=dtype), torch.tensor([3])
    assert normalize_over_tokens(values, counts, std_floor=1e-6).dtype == dtype
    assert values.tolist() == [1.0, 2.0, 4.0]
