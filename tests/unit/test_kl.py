"""The KL term against OpenRLHF's own estimators, and against plain Python."""

import math

import pytest
import torch
from openrlhf.models.utils import compute_approx_kl

from gapo_megatron.loss.kl import KLConfig, approximate_kl

CONFIGS = [KLConfig(k, unbiased) for k in ("k1", "k2", "k3") for unbiased in (False, True)]


def problem(spread: float = 1.0, tokens: int = 64):
    generator = torch.Generator().manual_seed(0)
    log_probs, base, old = (-3 + spread * torch.randn(tokens, generator=generator).double() for _ in range(3))
    mask = torch.rand(tokens, generator=generator) > 0.3
    return log_probs.requires_grad_(), base, old, mask


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("spread", [0.3, 8.0])  # the second reaches every bound
def test_values_and_gradients_are_openrlhfs(config, spread):
    log_probs, base, old, mask = problem(spread)
    upstream = torch.linspace(-1, 2, log_probs.numel(), dtype=torch.float64)
    (approximate_kl(log_probs, base, old, mask, config) * upstream).sum().backward()
    theirs = log_probs.detach().clone().requires_grad_()
    value = compute_approx_kl(theirs, base, old, config.estimator, config.unbiased_gradient)
    (value * upstream * mask).sum().backward()
    torch.testing.assert_close(
        approximate_kl(log_probs, base, old, mask, config), (value * mask).double(), rtol=1e-5, atol=1e-5
    )
    # Theirs is computed in fp32.
    torch.testing.assert_close(log_probs.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def plain(log_prob: float, base: float, old: float, config: KLConfig) -> tuple[float, float]:
    """Value and gradient at one token, away from the bounds."""
    d = log_prob - base
    values = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}
    value, gradient = values[config.estimator]
    return value, math.exp(log_prob - old) * d if config.unbiased_gradient else gradient


@pytest.mark.parametrize("config", CONFIGS)
def test_values_and_gradients_are_those_of_the_formulas_in_fp64(config):
    log_probs, base, old, mask = problem(0.3)
    kl = approximate_kl(log_probs, base, old, mask, config)
    kl.sum().backward()
    for i in range(len(mask)):
        value, gradient = plain(log_probs[i].item(), base[i].item(), old[i].item(), config) if mask[i] else (0.0, 0.0)
        assert kl[i].item() == pytest.approx(value, abs=1e-14)
        assert log_probs.grad[i].item() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_outside_of_the_mask_have_no_value_and_no_gradient(config):
    log_probs, base, old, mask = problem()
    with torch.no_grad():
        log_probs[~mask] = torch.inf
    base[~mask] = torch.nan
    kl = approximate_kl(log_probs, base, old, mask, config)
    kl.sum().backward()
    assert not kl[~mask].any() and not log_probs.grad[~mask].any()
    assert torch.isfinite(kl).all() and torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_policy_that_is_its_reference_has_a_divergence_of_exactly_zero(config):
    log_probs, _, old, mask = problem()
    assert not approximate_kl(log_probs, log_probs.detach(), old, mask, config).any()
