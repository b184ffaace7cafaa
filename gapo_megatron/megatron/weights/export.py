"""This model's shards -> a stream of full Hugging Face tensors on rank 0, one parameter at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.groups import Groups
from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.offload import require_resident
from gapo_megatron.megatron.weights.local import local_parameters
from gapo_megatron.megatron.weights.mapping import Parameter, dimensions, parameters


class WeightExport:
    """Re-iterable stream of `(Hugging Face name, full tensor)`.

    Every rank iterates. Per parameter, the tensor-parallel ranks that hold its first replica gather it, and the first of
    them sends it to rank 0, which yields it; the other ranks yield nothing. No rank holds more than one parameter beside its
    own shards. A yielded tensor may share memory with the model: use or copy it before the next training step.

    Args:
        chunks: this rank's part of the model, whose parameters are read afresh by every iteration.
        hf_config: of the whole model.
        shapes: full shape of each Hugging Face tensor (`HFReader.shapes`).
        groups: of this rank.
    """

    def __init__(
        self, chunks: Sequence[PolicyModel], hf_config: Any, shapes: dict[str, tuple[int, ...]], groups: Groups
    ) -> None:
        self.shapes = shapes
        self.local = list(local_parameters(chunks, parameters(hf_config)))
        self.dims = dimensions(hf_config, chunks[0].config.tensor_model_parallel_size)
        self.groups = groups
        self.dtype = chunks[0].config.params_dtype
        self.owners = self._find_owners()

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and full shape of every tensor, in the order of iteration. No collective."""
        return [(name, self.dtype, self.shapes[name]) for parameter, _ in self.local for name in parameter.hf_names]

    def _find_owners(self) -> list[int]:
        """For each parameter, the rank that sends it. One all-reduce over all ranks."""
        sends = [
            target is not None and self._is_first_replica(parameter) and self._tensor_group(parameter).rank() == 0
            for parameter, target in self.local
        ]
        owners = torch.where(torch.tensor(sends), dist.get_rank(), -1).to(runtime.device())
        dist.all_reduce(owners, op=dist.ReduceOp.MAX)
        return owners.tolist()

    def _is_first_replica(self, parameter: Parameter) -> bool:
        group = self.groups.dp_cp if parameter.expert is None else self.groups.expert_dp
        return group.rank() == 0

    def _tensor_group(self, parameter: Parameter) -> dist.ProcessGroup:
        return self.groups.tp if parameter.expert is None else self.groups.expert_tp

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensors in self.steps():
            yield from tensors

    def stream(self, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same stream for a value of each parameter shaped like it, such as its gradient."""
        for tensors in self.steps(value):
            yield from tensors

    def steps(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The stream by parameter, so that other collectives can be put between: on every rank one list for each of
        `local`, which is empty on all but global rank 0."""
        require_resident(self._any_parameter())
        for (parameter, target), owner in zip(self.local, self.owners, strict=True):
            merged = None
            if target is not None and self._is_first_replica(parameter):
                merged = self._merge(parameter, value(target))
            dtype = value(self._any_parameter()).dtype
            yield list(zip(parameter.hf_names, self._to_first_rank(parameter, merged, owner, dtype), strict=False))

    def _any_parameter(self) -> torch.nn.Parameter:
        return next(target for _, target in self.local if target is not None)

    def _merge(self, parameter: Parameter, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """Full tensors on the first tensor-parallel rank, None on the others."""
        group = self._tensor_group(parameter)
        shards = [shard]
        if group.size() > 1 and not parameter.sharding.replicated:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard.contiguous(), group=group)
        return parameter.sharding.merge(shards, self.dims) if group.rank() == 0 else None

    def _to_first_rank(
        self, parameter: Parameter, merged: list[torch.Tensor] | None, owner: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The tensors on rank 0, an empty list elsewhere."""
        rank = dist.get_rank()
        if rank == owner and merged is not None:
            if rank == 0:
                return merged
            for tensor in merged:
                dist.send(tensor.contiguous(), dst=0)
        if rank != 0:
            return []
        received = []
        for name in parameter.hf_names:
            buffer = torch.empty(self.shapes[name], dtype=dtype, device=runtime.device())
            dist.recv(buffer, src=owner)
            received.append(buffer)
        return received
