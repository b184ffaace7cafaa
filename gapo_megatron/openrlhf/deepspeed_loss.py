"""GAPO, and the baselines through the same code, on OpenRLHF's DeepSpeed actor."""

from typing import Any

import torch

from gapo_megatron.loss.aggregate import denominator
from gapo_megatron.loss.clip import upper_clip
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.policy_loss import policy_loss
from gapo_megatron.loss.ratio import sequence_log_ratio_sums


def select(args: Any, openrlhf_loss: torch.nn.Module) -> torch.nn.Module:
    """OpenRLHF's own loss, or ours when `arguments.resolve` chose it."""
    config = getattr(args, "policy_loss_config", None)
    return openrlhf_loss if config is None else PaddedPolicyLoss(config)


class PaddedPolicyLoss(torch.nn.Module):
    """`gapo_megatron.loss` behind the call contract of `openrlhf.models.loss.PolicyLoss`."""

    def __init__(self, config: PolicyLossConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: torch.Tensor | float | None = None,
        global_batch_size: torch.Tensor | float | None = None,
        *,
        correct: torch.Tensor,
        group_correct: torch.Tensor,
        group_size: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """The loss of one micro-batch, scaled as OpenRLHF's `aggregate_loss` scales it.

        Args:
            log_probs, old_log_probs, advantages, action_mask: [batch, response_length].
            rollout_log_probs: not used; a train/rollout correction is refused by `arguments.resolve`.
            dp_size: undoes the averaging of gradients over data-parallel ranks.
            batch_num_tokens, global_batch_size: response tokens and non-empty sequences of the optimizer step over all
                ranks, the denominator of policy, KL and entropy terms alike; None takes this micro-batch's own.
            correct, group_correct, group_size: [batch], of `experience.loss_arguments`.

        Returns:
            loss, clip fraction, approximate KL, None, None.
        """
        batch, length = log_probs.shape
        mask = action_mask.bool()
        response_lengths = mask.sum(dim=1)
        sequence_ids = torch.arange(batch, device=log_probs.device).repeat_interleave(length)
        log_probs, old_log_probs, advantages, mask = (
            t.reshape(-1) for t in (log_probs, old_log_probs, advantages, mask)
        )
        sums = sequence_log_ratio_sums(log_probs, old_log_probs, mask, sequence_ids, batch)
        result = policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            mask,
            sequence_ids,
            sums / response_lengths.clamp(min=1),
            upper_clip(group_correct, group_size, correct.bool(), self.config),
            response_lengths,
            self.config,
        )
        total = batch_num_tokens if self.config.aggregation == "token-mean" else global_batch_size
        if total is None:
            total, dp_size = denominator(mask, response_lengths, self.config.aggregation).clamp(min=1), 1
        tokens = result.tokens.clamp(min=1)
        clip_fraction = (result.clipped_upper + result.clipped_lower) / tokens
        return result.loss_sum / total * dp_size, clip_fraction, result.approx_kl_sum / tokens, None, None
