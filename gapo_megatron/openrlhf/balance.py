"""Which data-parallel rank computes which rollout under `--train.dynamic_batch_enable`: about as many tokens each.

OpenRLHF balances twice, for the log-prob pass and again for training. Here it is decided once, before both, by the order of
the rollouts: so both passes meet the same packs on the same ranks, and log s is exactly 0 before the first update.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gapo_megatron.openrlhf.rollouts import mini_batches, num_steps


def reorder(args: Any, samples: list[Any]) -> list[Any]:
    """The rollouts in the order in which OpenRLHF's cut into consecutive shares gives each rank what it should compute.

    Args:
        args: with `balance_ranks` of `arguments.resolve`; without it the order stays.
        samples: with `total_length`, each.
    """
    if not getattr(args, "balance_ranks", False):
        return samples
    data_parallel = args.megatron_layout.data_parallel_size
    sizes = share_sizes(len(samples), args.rollout.micro_batch_size, data_parallel)
    steps = num_steps(min(sizes), args.train.batch_size, data_parallel)
    return [samples[i] for i in balanced_order([int(s.total_length) for s in samples], sizes, steps)]


def share_sizes(num_samples: int, batch_size: int, ranks: int) -> list[int]:
    """Samples of each data-parallel rank, when `RayActorGroup.async_run_method_batch` shares out batches of them."""
    num_batches = -(-num_samples // batch_size)
    share = -(-num_batches // ranks) * batch_size
    return [max(0, min(share, num_samples - rank * share)) for rank in range(ranks)]


def balanced_order(lengths: Sequence[int], sizes: Sequence[int], steps: int) -> list[int]:
    """Exchange samples between the ranks, within each optimizer step: what a step trains on stays the same.

    Longest first, each to the rank with the fewest tokens that has room.

    Args:
        lengths: tokens of each sample, in the present order.
        sizes: samples of each rank, which takes consecutive ones.
        steps: optimizer steps; see `rollouts.mini_batches`.

    Returns:
        indices into `lengths` in the new order.
    """
    order = [0] * len(lengths)
    starts = list(accumulate(sizes, initial=0))[:-1]
    for parts in zip(*(mini_batches(size, steps) for size in sizes), strict=True):
        places = [range(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=True)]
        shares: list[list[int]] = [[] for _ in sizes]
        tokens = [0] * len(sizes)
        for i in sorted((i for place in places for i in place), key=lambda i: (-lengths[i], i)):
            with_room = (r for r, place in enumerate(places) if len(shares[r]) < len(place))
            rank = min(with_room, key=tokens.__getitem__)
            shares[rank].append(i)
            tokens[rank] += lengths[i]
        for place, share in zip(places, shares, strict=True):
            order[place.start : place.stop] = sorted(share)
    return order
