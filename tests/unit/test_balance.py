"""The order of rollouts under dynamic batching, through OpenRLHF's own splitting and sharing out."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.openrlhf.balance import balanced_order, share_sizes
from gapo_megatron.openrlhf.rollouts import mini_batches

RANKS, BATCH_SIZE, STEPS = 2, 16, 2


def lengths_of(num: int, seed: int) -> list[int]:
    """Skewed, as responses are: a few long ones, and rising along the batch."""
    generator = torch.Generator().manual_seed(seed)
    return [int(4 + 40 * x**4 + i) for i, x in enumerate(torch.rand(num, generator=generator).tolist())]


def tokens_by_step(order: list[int], lengths: list[int], sizes: list[int], steps: int) -> list[list[int]]:
    """Tokens of each rank, for each optimizer step."""
    shares, start = [], 0
    for size in sizes:
        share = order[start : start + size]
        shares.append([sum(lengths[i] for i in share[part]) for part in mini_batches(size, steps)])
        start += size
    return [list(step) for step in zip(*shares, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_get_about_as_many_tokens_in_every_optimizer_step(seed):
    lengths, sizes = lengths_of(32, seed), [16, 16]
    before = tokens_by_step(list(range(32)), lengths, sizes, STEPS)
    order = balanced_order(lengths, sizes, STEPS)
    after = tokens_by_step(order, lengths, sizes, STEPS)
    assert sorted(order) == list(range(32))
    assert [sum(step) for step in after] == [sum(step) for step in before]
    for step in after:
        # Longest first: what is left of a difference is at most one rollout.
        assert max(step) - min(step) <= max(lengths)
    spread = [sum(max(step) / sum(step) for step in steps) for steps in (before, after)]
    assert spread[1] < spread[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("sizes", "steps"), [([16, 16], 2), ([8, 8, 4], 1), ([8, 8, 0], 1), ([7, 7, 6], 3)])
def test_each_optimizer_step_keeps_its_rollouts(sizes, steps, seed):
    num = sum(sizes)
    order = balanced_order(lengths_of(num, seed), sizes, steps)

    def members(order: list[int]) -> list[set[int]]:
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        cuts = zip(*(mini_batches(size, steps) for size in sizes), strict=True)
        return [
            {
                i
                for start, part in zip(starts, parts, strict=True)
                for i in order[start + part.start : start + part.stop]
            }
            for parts in cuts
        ]

    assert members(order) == members(list(range(num)))


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "ranks", "expected"),
    [(32, 4, 2, [16, 16]), (20, 4, 3, [8, 8, 4]), (16, 4, 3, [8, 8, 0]), (7, 4, 2, [4, 3]), (5, 1, 4, [2, 2, 1, 0])],
)
def test_shares_are_those_of_openrlhfs_ray_group(num_samples, batch_size, ranks, expected):
    assert share_sizes(num_samples, batch_size, ranks) == expected
    # async_run_method_batch, on the batches that split_rollout_samples makes
    batches = [list(range(num_samples))[i : i + batch_size] for i in range(0, num_samples, batch_size)]
    chunk = -(-len(batches) // ranks)
    assert [sum(map(len, batches[r * chunk : (r + 1) * chunk])) for r in range(ranks)] == expected


@pytest.mark.parametrize("balance", [False, True])
def test_openrlhfs_experience_maker_deals_out_balanced_shares(balance):
    lengths = lengths_of(32, 0)
    args = SimpleNamespace(
        balance_ranks=balance,
        megatron_layout=ParallelLayout(RANKS),
        rollout=SimpleNamespace(micro_batch_size=4),
        train=SimpleNamespace(batch_size=BATCH_SIZE, dynamic_batch_enable=False),
    )
    samples = [
        Experience(
            sequences=torch.full((1, n), i),
            attention_mask=torch.ones(1, n, dtype=torch.long),
            action_mask=torch.ones(1, n - 1, dtype=torch.long),
            total_length=torch.tensor([float(n)]),
            rewards=torch.tensor([float(i)]),
        )
        for i, n in enumerate(lengths)
    ]
    maker = SimpleNamespace(args=args, tokenizer=SimpleNamespace(pad_token_id=0))
    batches = RemoteExperienceMaker.split_rollout_samples(maker, samples)
    order = [i for batch in batches for i in batch.index]
    # The index is the place in the prompts' order, by which group statistics and advantages are taken.
    assert order == [int(reward) for batch in batches for reward in batch.rewards]
    assert order == (balanced_order(lengths, [16, 16], STEPS) if balance else list(range(32)))
