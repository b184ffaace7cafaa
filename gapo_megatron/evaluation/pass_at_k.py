"""pass@k: the chance that at least one of k samples is correct."""

from dataclasses import dataclass
from math import comb

import numpy as np


def pass_at_k(correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) of every prompt (https://arxiv.org/abs/2107.03374).

    Args:
        correct: [num_prompts] integers c, correct samples of n.
        n: samples per prompt.
        k: samples of which one must be correct.

    Returns:
        [num_prompts] float64 in [0, 1].

    Raises:
        ValueError: k is not between 1 and n, or a count is not between 0 and n.
    """
    correct = np.asarray(correct)
    if not 1 <= k <= n:
        raise ValueError(f"--k {k} is not between 1 and --n {n}; draw more samples or ask for a smaller k")
    if correct.size and not (correct.min() >= 0 and correct.max() <= n):
        raise ValueError(f"counts of correct samples must be between 0 and --n {n}")
    by_count = np.array([1 - comb(n - c, k) / comb(n, k) for c in range(n + 1)])  # exact integers, one division
    return by_count[correct]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its interval."""

    mean: float
    low: float
    high: float


def mean_with_interval(values: np.ndarray, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """The mean of `values` [num_prompts] and its percentile-bootstrap interval over prompts.

    The prompts are what is resampled: the interval tells how far another draw of prompts (with their samples) could lie.
    """
    rows = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(values.mean()), float(low), float(high))
