"""The clipped policy loss (eq. 12), summed over tokens."""

from dataclasses import dataclass

import torch

from gapo_megatron.loss.aggregate import token_weights
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.ratio import importance_ratio


@dataclass(frozen=True)
class PolicyLossOutput:
    """Sums over the tokens given; scalars in float64. Everything but `loss_sum` is detached and not weighted.

    Attributes:
        loss_sum: weighted sum of the token losses; divide by the whole optimizer step's `aggregate.denominator`.
        clipped_upper, clipped_lower: tokens without gradient because their ratio left the interval.
        tokens: response tokens.
        abs_log_ratio_sum: sum over tokens of |log s_i|, or of |log ratio| per token with importance level "token".
        abs_log_ratio_max: the largest of these (not a sum).
        approx_kl_sum: sum over tokens of log pi_old - log pi_theta, the estimator OpenRLHF logs as ppo_kl.
    """

    loss_sum: torch.Tensor
    clipped_upper: torch.Tensor
    clipped_lower: torch.Tensor
    tokens: torch.Tensor
    abs_log_ratio_sum: torch.Tensor
    abs_log_ratio_max: torch.Tensor
    approx_kl_sum: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    sequence_log_ratio: torch.Tensor,
    eps_hi: torch.Tensor,
    response_lengths: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """max(-A s, -A clip(s, 1 - eps_lo, 1 + eps_hi)) (eq. 12) of each token, weighed and summed.

    Tokens outside of the mask contribute exactly 0 to the loss and to every gradient, whatever their values (nan and inf
    included); a zero advantage contributes a gradient of exactly 0.

    Args:
        log_probs: [num_tokens] of the policy, with gradient.
        old_log_probs: [num_tokens] of the policy before the step, from the same kernels.
        advantages: [num_tokens], constant over a sequence for group-relative estimators (eq. 2).
        mask: [num_tokens] bool (or 0 and 1), response tokens.
        sequence_ids: [num_tokens] long, the sequence of each token.
        sequence_log_ratio: [num_sequences] log s_i (see `ratio.sequence_log_ratio_sums`).
        eps_hi: [num_sequences] upper clip widths (see `clip.upper_clip`).
        response_lengths: [num_sequences] response tokens of each whole sequence.
        config: lower width, importance level, aggregation, dual clip.
    """
    mask = mask.bool()
    # Selecting, not multiplying: 0 * nan is nan, and so would be its gradient.
    log_probs, old_log_probs, advantages = (
        torch.where(mask, x.double(), 0.0) for x in (log_probs, old_log_probs.detach(), advantages.detach())
    )
    ratio = importance_ratio(log_probs, old_log_probs, sequence_ids, sequence_log_ratio, config.importance_level)
    upper = 1.0 + eps_hi.detach().double()[sequence_ids]
    lower = torch.full_like(upper, 1.0 - config.eps_lo)

    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(lower, upper))  # eq. 12
    if config.dual_clip is not None:  # caps what a far-off ratio can add (https://arxiv.org/abs/1912.09729)
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
    weights = token_weights(mask, sequence_ids, response_lengths, config.aggregation)

    fixed = ratio.detach()
    abs_log_ratio = torch.where(mask, fixed.log().abs(), 0.0)
    return PolicyLossOutput(
        loss_sum=(weights * loss).sum(),
        clipped_upper=((advantages > 0) & (fixed > upper)).sum(),
        clipped_lower=((advantages < 0) & (fixed < lower)).sum(),
        tokens=mask.sum(),
        abs_log_ratio_sum=abs_log_ratio.sum(),
        # The zero stands for a batch without tokens.
        abs_log_ratio_max=torch.cat([abs_log_ratio, abs_log_ratio.new_zeros(1)]).max(),
        approx_kl_sum=(old_log_probs - log_probs.detach()).sum(),
    )
