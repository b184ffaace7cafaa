"""Group statistics through OpenRLHF's own splitting, packing and balancing."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.openrlhf.experience import attach_group_statistics, loss_arguments
from gapo_megatron.openrlhf.placement import by_node
from gapo_megatron.openrlhf.rollouts import (
    mini_batches,
    padded_log_probs,
    rollouts_of_batch,
    rollouts_of_experience,
)

REWARDS = [1.0, 0.0, 0.2, 0.0, 1.0, 1.0, 0.6, 0.9]  # two groups of four: c = 1 and c = 4


def arguments(**loss) -> SimpleNamespace:
    config = PolicyLossConfig(**loss)
    return SimpleNamespace(
        policy_loss_config=config,
        rollout=SimpleNamespace(n_samples_per_prompt=4),
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=2),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )


def experiences(order: list[int], batch: int) -> list[Experience]:
    """Batches of `batch` samples in `order`, as a balanced split would leave them; sample i has i + 3 tokens."""
    result = []
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        longest = max(indices) + 3
        sequences = torch.zeros(len(indices), longest, dtype=torch.long)
        attention = torch.zeros_like(sequences)
        for row, i in enumerate(indices):
            sequences[row, : i + 3] = i + 10
            attention[row, : i + 3] = 1
        action = attention[:, 1:].clone()
        action[:, 0] = 0
        values = torch.ones(len(indices), longest - 1)
        result.append(
            Experience(
                sequences=sequences,
                attention_mask=attention,
                action_mask=action,
                action_log_probs=-values,
                advantages=values,
                rewards=torch.tensor([REWARDS[i] for i in indices]),
                total_length=torch.tensor([i + 3.0 for i in indices]),
                index=list(indices),
                info={},
            )
        )
    return result


@pytest.mark.parametrize("order", [list(range(8)), [5, 0, 7, 2, 1, 6, 3, 4]])
def test_statistics_are_of_the_whole_group_in_any_order_of_samples(order):
    batches = experiences(order, 2)
    attach_group_statistics(arguments(), batches)
    for batch in batches:
        assert batch.info["group_correct"].tolist() == [1.0 if i < 4 else 4.0 for i in batch.index]
        assert batch.info["correct"].tolist() == [float(REWARDS[i] >= 0.5) for i in batch.index]
        assert batch.info["group_size"].tolist() == [4.0] * len(batch.index)


def test_the_threshold_decides_what_is_correct():
    batches = experiences(list(range(8)), 8)
    attach_group_statistics(arguments(correct_threshold=0.95), batches)
    assert batches[0].info["group_correct"].tolist() == [1.0] * 4 + [2.0] * 4


def test_nothing_is_attached_for_openrlhfs_own_loss():
    batches = experiences(list(range(8)), 8)
    args = SimpleNamespace(policy_loss_config=None, rollout=SimpleNamespace(n_samples_per_prompt=4))
    attach_group_statistics(args, batches)
    assert batches[0].info == {} and loss_arguments(args, batches[0]) == {}


def test_statistics_travel_through_balancing_to_the_rollouts():
    args = arguments(eps_lo=1e-3, eps_hi_max=4e-3)
    batches = experiences([5, 0, 7, 2, 1, 6, 3, 4], 2)
    attach_group_statistics(args, batches)
    for batch in balance_experiences(batches, args):
        tensors = loss_arguments(args, batch)
        rollouts = rollouts_of_experience(batch, args.policy_loss_config)
        for row, rollout in enumerate(rollouts):
            sample = int(rollout.tokens[0]) - 10
            assert rollout.length == sample + 3 and rollout.response_length == sample + 1
            assert tensors["group_correct"][row] == (1 if sample < 4 else 4)
            assert rollout.eps_hi == pytest.approx(4e-3 if sample == 0 else 1e-3, abs=1e-15)


def test_log_probs_return_to_the_padded_layout():
    batch = experiences(list(range(4)), 4)[0]
    rollouts = rollouts_of_batch(batch.sequences, batch.action_mask, batch.attention_mask)
    assert [r.length for r in rollouts] == [3, 4, 5, 6]
    values = [torch.arange(r.length - 1.0) * r.response_mask for r in rollouts]
    padded = padded_log_probs(values, batch.action_mask)
    assert padded.shape == batch.action_mask.shape
    assert torch.equal(padded != 0, batch.action_mask.bool())


@pytest.mark.parametrize(("rollouts", "steps"), [(8, 2), (7, 2), (5, 5), (3, 1)])
def test_mini_batches_hold_every_rollout_once(rollouts, steps):
    parts = mini_batches(rollouts, steps)
    assert len(parts) == steps
    assert [i for part in parts for i in range(rollouts)[part]] == list(range(rollouts))


def test_ranks_follow_the_nodes():
    assert by_node({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 2, 1, 3]
    assert by_node({i: "a" for i in range(8)}) == list(range(8))
