import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topd.ops.estimate import bootstrap_interval, pass_at_k


@pytest.mark.parametrize(
    ("num_correct", "k", "expected"),
    [
        (0, 1, 0.0),
        (4, 4, 1.0),
        (1, 1, 0.25),  # 1 - C(3,1) / C(4,1) = 1 - 3 / 4
        (1, 2, 0.5),  # 1 - C(3,2) / C(4,2) = 1 - 3 / 6
        (2, 2, 5 / 6),  # 1 - C(2,2) / C(4,2) = 1 - 1 / 6
        (1, 4, 1.0),
        (3, 2, 1.0),  # two of four with one wrong: at least one is right
    ],
)
def test_pass_at_k_literals(num_correct, k, expected):
    correct = np.arange(4)[None, :] < num_correct
    assert pass_at_k(correct, k).tolist() == pytest.approx([expected])


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(row, data):
    k = data.draw(st.integers(1, len(row)))
    choices = [any(choice) for choice in itertools.combinations(row, k)]
    assert pass_at_k(np.array([row]), k).item() == pytest.approx(sum(choices) / len(choices))


def test_pass_at_k_is_unbiased():
    # over all 2^6 outcomes of 6 samples that are right with chance 0.3: the expectation is 1 - 0.7^3
    expected = 0.0
    for outcome in itertools.product([False, True], repeat=6):
        chance = np.prod([0.3 if right else 0.7 for right in outcome])
        expected += chance * pass_at_k(np.array([outcome]), 3).item()
    assert expected == pytest.approx(1 - 0.7**3)


def test_pass_at_1_is_avg_at_k_and_pass_at_k_grows():
    correct = np.random.default_rng(0).random((20, 9)) < 0.3
    assert pass_at_k(correct, 1) == pytest.approx(correct.mean(axis=1))
    by_k = np.stack([pass_at_k(correct, k) for k in range(1, 10)])
    assert (np.diff(by_k, axis=0) >= -1e-12).all()
    assert by_k[-1].tolist() == correct.any(axis=1).astype(float).tolist()


@pytest.mark.parametrize("k", [0, -1, 5])
def test_pass_at_k_outside_its_range_is_an_error(k):
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        pass_at_k(np.zeros((2, 4), dtype=bool), k)


def test_pass_at_k_with_many_samples_is_exact():
    # a product of 256 floats would drift; integers do not: 1 - C(255, 256) / C(256, 256) = 1
    correct = np.arange(256)[None, :] < 1
    assert pass_at_k(correct, 256).item() == 1.0
    assert pass_at_k(correct, 1).item() == pytest.approx(1 / 256)


def test_bootstrap_is_deterministic_in_its_seed():
    values = np.random.default_rng(1).random(30)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_bootstrap_holds_the_mean_and_has_the_width_of_the_normal_approximation():
    values = np.random.default_rng(2).normal(0.5, 0.1, size=200)
    low, high = bootstrap_interval(values, seed=0)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 200**0.5, rel=0.05)


def test_bootstrap_widens_with_level_and_narrows_with_problems():
    values = np.random.default_rng(3).random(100)
    low, high = bootstrap_interval(values, seed=0, resamples=2000)
    low99, high99 = bootstrap_interval(values, seed=0, resamples=2000, level=0.99)
    assert low99 < low < high < high99
    fewer_low, fewer_high = bootstrap_interval(values[:25], seed=0, resamples=2000)
    assert fewer_high - fewer_low > high - low


@pytest.mark.parametrize("values", [[0.7], [0.25] * 5], ids=["one problem", "equal problems"])
def test_bootstrap_without_spread_is_a_point(values):
    assert bootstrap_interval(np.array(values), seed=0) == pytest.approx((values[0], values[0]))


def test_bootstrap_covers_about_as_often_as_it_says():
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval(generator.random(40), seed=trial, resamples=300)
        hits += low <= 0.5 <= high
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize("resamples", [1, 700, 10_000])
def test_bootstrap_takes_as_many_resamples_as_asked_for(resamples):
    """As one plain draw would; many problems are drawn in parts, of which the last is smaller."""
    values = np.random.default_rng(6).random(300)
    at_once = 1_000_000 // 300
    generator, means = np.random.default_rng(9), []
    for start in range(0, resamples, at_once):
        picks = generator.integers(0, 300, size=(min(at_once, resamples - start), 300))
        means += values[picks].mean(axis=1).tolist()
    assert len(means) == resamples
    expected = np.quantile(means, [0.025, 0.975])
    assert bootstrap_interval(values, seed=9, resamples=resamples) == pytest.approx(tuple(expected), abs=1e-12)
