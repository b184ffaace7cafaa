"""KL divergence from a reference model as a term of the loss, with the estimators of OpenRLHF (`compute_approx_kl`)."""

from dataclasses import dataclass
from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]

# OpenRLHF's bounds: of each token's estimate, and of the importance weight pi_theta / pi_old.
MAX_KL = 10.0
MAX_IMPORTANCE_WEIGHT = 10.0


@dataclass(frozen=True)
class KLConfig:
    """Which estimate of the divergence, and which gradient.

    Attributes:
        estimator: with d = log pi_theta - log pi_ref, k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d
            (http://joschu.net/blog/kl-approx.html).
        unbiased_gradient: keep the estimate's value, but take the gradient of the reverse KL itself, with importance
            weights for rollouts of an older policy. Otherwise the gradient is that of the estimate.
    """

    estimator: KLEstimator = "k1"
    unbiased_gradient: bool = False


def approximate_kl(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    config: KLConfig,
) -> torch.Tensor:
    """The estimate at each token. Tokens outside of the mask are exactly 0 and give no gradient, whatever their values.

    Args:
        log_probs: [num_tokens] of the policy, with gradient.
        base_log_probs: [num_tokens] of the reference model.
        old_log_probs: [num_tokens] of the policy that generated the rollouts; read for `unbiased_gradient` only.
        mask: [num_tokens] bool (or 0 and 1), response tokens.
        config: see `KLConfig`.

    Returns:
        [num_tokens] float64; weigh it by `aggregate.token_weights`, as the policy term is.
    """
    mask = mask.bool()
    log_probs, base_log_probs, old_log_probs = (
        torch.where(mask, x.double(), 0.0) for x in (log_probs, base_log_probs.detach(), old_log_probs.detach())
    )
    log_ratio = log_probs - base_log_probs
    if config.estimator == "k1":
        value = log_ratio
    elif config.estimator == "k2":
        value = log_ratio**2 / 2
    else:
        # Bounded before exp: an overflow would make the gradient 0 * inf. k3 is beyond the final bound there anyway.
        bounded = log_ratio.clamp(min=-MAX_KL)
        value = (-bounded).exp() - 1 + bounded
    value = value.clamp(-MAX_KL, MAX_KL)
    if not config.unbiased_gradient:
        return value
    weight = (log_probs.detach() - old_log_probs).exp().clamp(max=MAX_IMPORTANCE_WEIGHT)
    surrogate = weight * log_ratio**2 / 2  # its gradient: weight * log_ratio * grad log pi_theta
    return value.detach() + surrogate - surrogate.detach()
