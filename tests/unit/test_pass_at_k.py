"""pass@k against enumeration, its limits, and the interval over prompts."""

from itertools import combinations

import numpy as np
import pytest

from gapo_megatron.evaluation.pass_at_k import mean_with_interval, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_the_share_of_all_subsets_that_hold_a_correct_sample(n):
    for k in range(1, n + 1):
        for c in range(n + 1):
            subsets = [any(i < c for i in subset) for subset in combinations(range(n), k)]
            # Reference: every subset of k samples, float64; both sides are one quotient of integers.
            assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(np.mean(subsets), abs=1e-15)


def test_pass_at_one_is_the_share_of_correct_samples_and_pass_at_n_is_whether_there_is_one():
    correct = np.arange(9)
    np.testing.assert_allclose(pass_at_k(correct, 8, 1), correct / 8, rtol=1e-15)
    np.testing.assert_array_equal(pass_at_k(correct, 8, 8), correct > 0)


def test_estimate_is_unbiased_for_a_known_success_rate():
    n, k, p = 16, 4, 0.1
    correct = np.random.default_rng(0).binomial(n, p, size=200_000)
    # The standard error of the mean is below 1e-3 (values lie in [0, 1]); 4 of them.
    assert pass_at_k(correct, n, k).mean() == pytest.approx(1 - (1 - p) ** k, abs=4e-3)


def test_large_counts_do_not_overflow():
    values = pass_at_k(np.array([0, 1, 512, 1024]), 1024, 256)
    np.testing.assert_allclose(values[[0, 1, 3]], [0, 0.25, 1], rtol=1e-12)
    assert 1 - 1e-12 < values[2] <= 1


@pytest.mark.parametrize("k", [0, 9])
def test_k_outside_of_the_samples_is_refused_with_the_flag(k):
    with pytest.raises(ValueError, match="--k"):
        pass_at_k(np.array([1]), 8, k)


def test_a_count_above_n_is_refused():
    with pytest.raises(ValueError, match="--n 8"):
        pass_at_k(np.array([9]), 8, 1)


def test_interval_has_the_width_of_the_standard_error_and_shrinks_with_more_prompts():
    rng = np.random.default_rng(1)
    widths = []
    for prompts in (64, 1024):
        values = rng.binomial(8, 0.4, size=prompts) / 8
        estimate = mean_with_interval(values)
        assert estimate.low < estimate.mean == values.mean() < estimate.high
        normal = 2 * 1.96 * values.std() / np.sqrt(prompts)
        assert estimate.high - estimate.low == pytest.approx(normal, rel=0.05)
        widths.append(estimate.high - estimate.low)
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)


def test_interval_is_the_same_on_every_call():
    values = np.linspace(0, 1, 20)
    assert mean_with_interval(values) == mean_with_interval(values)
