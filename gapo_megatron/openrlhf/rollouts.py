"""OpenRLHF's padded batches -> the engine's rollouts, and its log-probs back."""

from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, remove_padding_in_sequences, split_experience_batch

from gapo_megatron.loss.clip import upper_clip
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron.batch import Rollout


def rollouts_of_batch(
    sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
) -> list[Rollout]:
    """Right-padded tensors -> rollouts for a forward pass.

    Args:
        sequences, attention_mask: [batch, length].
        action_mask: [batch, length - 1]; entry t is set where token t + 1 is a response token.
    """
    lengths = attention_mask.sum(dim=1).tolist()
    return [
        Rollout(tokens=sequences[i, :n].long(), response_mask=action_mask[i, : n - 1].bool())
        for i, n in enumerate(lengths)
    ]


def padded_log_probs(log_probs: list[torch.Tensor], action_mask: torch.Tensor) -> torch.Tensor:
    """Per-rollout log-probs -> [batch, length - 1], zero outside of the responses, as OpenRLHF's actor returns them."""
    padded = torch.zeros(action_mask.shape, dtype=torch.float32)
    for row, values in zip(padded, log_probs, strict=True):
        row[: values.numel()] = values
    return padded


def rollouts_of_experience(experience: Experience, loss: PolicyLossConfig) -> list[Rollout]:
    """A batch of experience, with group statistics in its `info`, -> rollouts for training."""
    items = remove_padding_in_sequences(split_experience_batch(experience))
    correct, group_correct, group_size = (_column(items, k) for k in ("correct", "group_correct", "group_size"))
    widths = upper_clip(group_correct, group_size, correct.bool(), loss)
    return [
        Rollout(
            tokens=item.sequences.long(),
            response_mask=item.action_mask.bool(),
            old_log_probs=item.action_log_probs.float(),
            advantages=item.advantages.float(),
            eps_hi=float(width),
            base_log_probs=None if item.base_action_log_probs is None else item.base_action_log_probs.float(),
        )
        for item, width in zip(items, widths, strict=True)
    ]


def _column(items: list[Any], key: str) -> torch.Tensor:
    return torch.tensor([float(item.info[key]) for item in items])


def num_steps(fewest_rollouts: int, batch_size: int, data_parallel: int) -> int:
    """Optimizer steps of one batch of rollouts.

    Args:
        fewest_rollouts: of all data-parallel ranks.
        batch_size: rollouts of one step on all ranks (`--train.batch_size`).
        data_parallel: ranks that share them.
    """
    return max(1, fewest_rollouts // max(1, batch_size // data_parallel))


def mini_batches(num_rollouts: int, num_steps: int) -> list[slice]:
    """Consecutive shares of nearly equal size, one per optimizer step; no rollout is dropped.

    Both the old-log-prob pass and the training pass cut by this, so that they meet the same packs.
    """
    bounds = [num_rollouts * i // num_steps for i in range(num_steps + 1)]
    return [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
