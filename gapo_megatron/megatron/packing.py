"""How packed sequences lie in memory, also when context-parallel ranks hold a part of each.

Context parallelism cuts every sequence into 2 x CP chunks of equal length; rank r holds chunks r and 2 x CP - 1 - r
(Megatron's zigzag), so that all ranks have the same share of the causal attention's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class Span:
    """Queries of one chunk, and the keys of its sequence up to its end: the chunk attends causally, aligned at the end.

    Attributes:
        queries: slice of this rank's tokens.
        keys: slice of the whole pack's tokens.
    """

    queries: slice
    keys: slice


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's carrier of packing data to the core attention, with ours: plain integers, and one index per pack.

    Attributes:
        spans: of this rank.
        global_order: [pack tokens] position in the ranks' concatenated tokens of each token of the pack; None without
            context parallelism.
    """

    spans: tuple[Span, ...] = ()
    global_order: torch.Tensor | None = None


def pack_sequences(
    lengths: Sequence[int], context_parallel_size: int, context_parallel_rank: int, device: torch.device
) -> PackedSequences:
    """Packing of sequences with `lengths`, each a multiple of 2 x CP when CP > 1."""
    size, rank = context_parallel_size, context_parallel_rank
    starts = [0, *accumulate(lengths)]
    if size == 1:
        whole = [slice(start, start + length) for start, length in zip(starts[:-1], lengths, strict=True)]
        return PackedSequences(qkv_format="sbhd", spans=tuple(Span(s, s) for s in whole))
    spans = []
    for start, length in zip(starts[:-1], lengths, strict=True):
        chunk = length // (2 * size)
        for half, index in enumerate((rank, 2 * size - 1 - rank)):
            first = start // size + half * chunk
            spans.append(Span(slice(first, first + chunk), slice(start, start + (index + 1) * chunk)))
    tokens_by_rank = torch.cat([local_tokens(lengths, size, r) for r in range(size)])
    return PackedSequences(qkv_format="sbhd", spans=tuple(spans), global_order=tokens_by_rank.argsort().to(device))


def local_tokens(lengths: Sequence[int], context_parallel_size: int, context_parallel_rank: int) -> torch.Tensor:
    """Positions in the whole pack of this rank's tokens, [pack tokens / CP] in their order on the rank."""
    size, rank = context_parallel_size, context_parallel_rank
    if size == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).view(2 * size, -1)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
        start += length
    return torch.cat(parts)


def padded_lengths(lengths: Sequence[int], context_parallel_size: int, tensor_parallel_size: int) -> list[int]:
    """Lengths that divide over the ranks, the last one a sequence of padding alone if the sum needs it.

    Args:
        lengths: tokens of each sequence.
        context_parallel_size: each length becomes a multiple of 2 x this, when it is above 1.
        tensor_parallel_size: the sum becomes a multiple of this (and of 2 x CP): sequence parallelism splits the pack.
    """
    size = context_parallel_size
    unit = 2 * size if size > 1 else 1
    padded = [-(-n // unit) * unit for n in lengths]
    total = sum(padded)
    tail = -total % (unit * tensor_parallel_size) if padded else unit * tensor_parallel_size
    return padded + [tail] if tail else padded
