"""How one Megatron parameter is cut over tensor-parallel ranks, and how it relates to Hugging Face tensors.

Each function pair is pure: `split_*` turns full Hugging Face tensors into the shard of one rank, `merge_*` turns the
shards of all ranks back. Shapes below write H for the hidden size, D for the size of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dimensions:
    """What the cutting needs to know of the model and the tensor-parallel group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tensor_parallel: int


@dataclass(frozen=True)
class Sharding:
    """`split(tensors, rank, dims) -> shard` and `merge(shards, dims) -> tensors`, inverses of each other.

    `dim` is the dimension that is cut; None for parameters that are the same on every tensor-parallel rank.
    """

    split: Callable[[Sequence[Tensor], int, Dimensions], Tensor]
    merge: Callable[[Sequence[Tensor], Dimensions], list[Tensor]]
    dim: int | None

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the whole parameter: merging needs no collective."""
        return self.dim is None


def _split_along(dim: int):
    def split(tensors: Sequence[Tensor], rank: int, dims: Dimensions) -> Tensor:
        return tensors[0].chunk(dims.tensor_parallel, dim=dim)[rank]

    return split


def _merge_along(dim: int):
    def merge(shards: Sequence[Tensor], dims: Dimensions) -> list[Tensor]:
        return [torch.cat(list(shards), dim=dim)]

    return merge


def split_vocab(tensors: Sequence[Tensor], rank: int, dims: Dimensions) -> Tensor:
    """[vocab, H] -> rows of `rank`, [ceil(vocab / TP), H], with zero rows of padding at the end of the last ranks."""
    rows = -(-dims.vocab_size // dims.tensor_parallel)
    shard = tensors[0][rank * rows : (rank + 1) * rows]
    return torch.nn.functional.pad(shard, (0, 0, 0, rows - shard.size(0)))


def merge_vocab(shards: Sequence[Tensor], dims: Dimensions) -> list[Tensor]:
    """Rows of all ranks -> [vocab, H], without the padding."""
    return [torch.cat(list(shards))[: dims.vocab_size]]


def split_qkv(tensors: Sequence[Tensor], rank: int, dims: Dimensions) -> Tensor:
    """q [heads * D, ...], k and v [kv_heads * D, ...] -> the rows of `rank` in Megatron's fused order.

    Each KV group is stored as its query heads, its key head, its value head; a rank's rows may end inside of a group where
    there are fewer groups than ranks. Serves weights [.., H] and biases [..].
    """
    groups = dims.num_kv_heads
    q, k, v = (t.view(groups, -1, *t.shape[1:]) for t in tensors)
    fused = torch.cat((q, k, v), dim=1)
    return fused.reshape(-1, *fused.shape[2:]).chunk(dims.tensor_parallel)[rank]


def merge_qkv(shards: Sequence[Tensor], dims: Dimensions) -> list[Tensor]:
    """Fused shards of all ranks -> q, k, v as Hugging Face stores them."""
    fused = torch.cat(list(shards))
    fused = fused.view(dims.num_kv_heads, -1, *fused.shape[1:])
    queries = dims.num_heads // dims.num_kv_heads * dims.head_dim
    return [part.reshape(-1, *part.shape[2:]) for part in fused.split((queries, dims.head_dim, dims.head_dim), dim=1)]


def split_gated(tensors: Sequence[Tensor], rank: int, dims: Dimensions) -> Tensor:
    """gate and up, each [I, H] -> [2 * I / TP, H]: the rank's part of gate, then of up."""
    return torch.cat([t.chunk(dims.tensor_parallel)[rank] for t in tensors])


def merge_gated(shards: Sequence[Tensor], dims: Dimensions) -> list[Tensor]:
    """Shards of all ranks -> gate, up."""
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [torch.cat(gates), torch.cat(ups)]


REPLICATED = Sharding(lambda tensors, rank, dims: tensors[0], lambda shards, dims: [shards[0]], dim=None)
ROW_PARALLEL = Sharding(_split_along(1), _merge_along(1), dim=1)
VOCAB_PARALLEL = Sharding(split_vocab, merge_vocab, dim=0)
QKV = Sharding(split_qkv, merge_qkv, dim=0)
GATED = Sharding(split_gated, merge_gated, dim=0)
