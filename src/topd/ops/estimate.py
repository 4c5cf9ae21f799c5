"""Estimates over benchmark problems: pass@k and their bootstrap intervals. numpy, float64."""

import math

import numpy as np


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased estimate, per problem, of the chance that at least one of k samples is right.

        1 - C(n - c, k) / C(n, k)      n samples, c of them right

    `correct` is boolean, [problem, sample]. Raises ValueError if k exceeds the number of samples.
    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1.
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples per problem, got k={k} with {num_samples} samples")
    num_wrong = num_samples - correct.sum(axis=1)
    all_ways = math.comb(num_samples, k)
    return np.array([1.0 - math.comb(int(wrong), k) / all_ways for wrong in num_wrong])


def bootstrap_interval(
    per_problem: np.ndarray, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems, whose samples stay together. Deterministic in `seed`."""
    generator = np.random.default_rng(seed)
    problems = len(per_problem)
    at_once = max(1, 1_000_000 // problems)
    sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    picks = (generator.integers(0, problems, size=(size, problems)) for size in sizes)
    means = np.concatenate([per_problem[pick].mean(axis=1) for pick in picks])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
