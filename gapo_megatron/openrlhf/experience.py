"""Group statistics: how many of a prompt's rollouts were correct, on every sample."""

from typing import Any

import torch

KEYS = ("correct", "group_correct", "group_size")


@torch.no_grad()
def attach_group_statistics(args: Any, experiences: list[Any]) -> None:
    """Put `correct`, `group_correct` (c) and `group_size` (k) of each sample into `Experience.info`, in place.

    Called while groups are complete and rewards are the verifier's own. Samples of one prompt are neighbours in the
    original order, which `experience.index` gives. They travel from there: splitting, packing and balancing keep `info`.
    Does nothing when OpenRLHF's own loss is used.

    Args:
        args: with `policy_loss_config` and `rollout.n_samples_per_prompt`.
        experiences: batches with `rewards` [batch] and `index` (list of ints).
    """
    config = getattr(args, "policy_loss_config", None)
    if config is None:
        return
    k = args.rollout.n_samples_per_prompt
    index = torch.tensor([i for experience in experiences for i in experience.index])
    rewards = torch.empty(len(index))
    rewards[index] = torch.cat([experience.rewards.float().reshape(-1) for experience in experiences])
    correct = (rewards >= config.correct_threshold).float()
    group_correct = correct.view(-1, k).sum(dim=1).repeat_interleave(k)
    for experience in experiences:
        samples = torch.tensor(experience.index)
        experience.info["correct"] = correct[samples]
        experience.info["group_correct"] = group_correct[samples]
        experience.info["group_size"] = torch.full((len(samples),), float(k))


def loss_arguments(args: Any, experience: Any) -> dict[str, torch.Tensor]:
    """Keyword arguments for the DeepSpeed actor's loss: each of `KEYS` as [batch]; none for OpenRLHF's own loss."""
    if getattr(args, "policy_loss_config", None) is None:
        return {}
    device = experience.sequences.device
    return {key: torch.as_tensor(experience.info[key], dtype=torch.float32, device=device) for key in KEYS}
