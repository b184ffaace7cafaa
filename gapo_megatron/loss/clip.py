"""The upper clip width of every rollout."""

import math

import torch

from gapo_megatron.loss.config import PolicyLossConfig


def upper_clip(
    group_correct: torch.Tensor, group_size: torch.Tensor, correct: torch.Tensor, config: PolicyLossConfig
) -> torch.Tensor:
    """eps_hi of each rollout, from how rare correct rollouts were in its group.

    In float64 throughout, because widths go down to 1e-5 and are added to 1.

    Args:
        group_correct: [num_sequences] c, correct rollouts in the complete group as generated.
        group_size: [num_sequences] k, rollouts in that group.
        correct: [num_sequences] bool (or 0 and 1), whether this rollout is one of the c.
        config: widths and schedule.

    Returns:
        [num_sequences] float64. Incorrect rollouts get eps_lo; with the fixed schedule all get eps_hi_max.

    Raises:
        ValueError: an adaptive schedule with a group of one rollout, or counts that contradict each other.
    """
    c, k, correct = group_correct.double(), group_size.double(), correct.bool()
    if config.clip_schedule == "fixed":
        return torch.full_like(c, config.eps_hi_max)
    if bool((k < 2).any()):
        raise ValueError(
            f"--clip_schedule {config.clip_schedule} compares the rollouts of a group; "
            "set --rollout.n_samples_per_prompt to at least 2 (the paper uses 8), or --clip_schedule fixed"
        )
    if bool(((c < correct.double()) | (c > k)).any()):
        raise ValueError("group_correct must lie in [0, group_size], and be at least 1 for a correct rollout")
    rarity = (k - c) / (k - 1)  # 1 for c = 1, 0 for c = k
    if config.clip_schedule == "linear":
        eps_hi = config.eps_lo + (config.eps_hi_max - config.eps_lo) * rarity  # eq. 11
    else:
        a, b = math.log1p(config.eps_lo), math.log1p(config.eps_hi_max)
        eps_hi = torch.expm1(a + (b - a) * rarity)  # eq. 9: 1 + eps_hi is exponential in the advantage
    return torch.where(correct, eps_hi, config.eps_lo)
