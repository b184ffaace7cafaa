"""This model's shards -> a stream of full Hugging Face tensors on the first rank, one parameter at a time."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.groups import Groups
from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.weights.load import local_name
from gapo_megatron.megatron.weights.mapping import Parameter, dimensions, parameters


class WeightExport:
    """Re-iterable stream of `(Hugging Face name, full tensor)`.

    Every rank of the first data-parallel replica iterates in lockstep: per parameter, one all-gather over the
    tensor-parallel group of the stage that holds it, and one transfer from that stage to the first. Real tensors are
    yielded on global rank 0; the other ranks of that replica yield nothing, and further replicas return at once. No rank
    holds more than one parameter beside its own shards. A yielded tensor may share memory with the model: use or copy it
    before the next training step.

    Args:
        model: this rank's stage, whose parameters are read afresh by every iteration.
        hf_config: of the whole model.
        shapes: full shape of each Hugging Face tensor (`HFReader.shapes`).
        groups: of this rank.
    """

    def __init__(self, model: PolicyModel, hf_config: Any, shapes: dict[str, tuple[int, ...]], groups: Groups) -> None:
        self.model = model
        self.shapes = shapes
        self.table = list(parameters(hf_config))
        self.dims = dimensions(hf_config, model.config.tensor_model_parallel_size)
        self.groups = groups
        self.in_first_replica = groups.dp_cp.rank() == 0
        self.is_sender = dist.get_rank() == 0
        self.dtype = model.config.params_dtype
        self.stage_of = self._locate()

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and full shape of every tensor, in the order of iteration. No collective."""
        return [(name, self.dtype, self.shapes[name]) for p in self.table for name in p.hf_names]

    def _locate(self) -> list[int]:
        """For each parameter, the pipeline stage that holds it. One all-reduce over the pipeline group."""
        held = [local_name(self.model, p) is not None for p in self.table]
        stages = torch.tensor(held, device=runtime.device()) * self.groups.pp.rank()
        dist.all_reduce(stages, group=self.groups.pp)
        return stages.tolist()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream({name: p.detach() for name, p in self.model.named_parameters()})

    def stream(self, shards: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same stream for other values of the parameters, such as their gradients: local name -> shard."""
        if not self.in_first_replica:
            return
        dtype = next(iter(shards.values())).dtype
        for parameter, stage in zip(self.table, self.stage_of, strict=True):
            name = local_name(self.model, parameter)
            merged = self._merge(parameter, shards[name]) if name is not None else None
            tensors = self._to_first_stage(parameter, merged, stage, dtype)
            yield from zip(parameter.hf_names, tensors, strict=False)

    def _merge(self, parameter: Parameter, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """Full tensors on the stage's first tensor-parallel rank, None on the others."""
        size = self.groups.tp.size()
        shards = [shard]
        if size > 1 and not parameter.sharding.replicated:
            shards = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather(shards, shard.contiguous(), group=self.groups.tp)
        return parameter.sharding.merge(shards, self.dims) if self.groups.tp.rank() == 0 else None

    def _to_first_stage(
        self, parameter: Parameter, merged: list[torch.Tensor] | None, stage: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The tensors on the sender, an empty list elsewhere."""
        if stage == 0 or self.groups.tp.rank() != 0:
            return merged if self.is_sender and merged is not None else []
        if merged is not None:
            for tensor in merged:
                dist.send(tensor.contiguous(), dst=self.groups.first_stage, group=self.groups.pp)
        if not self.is_sender:
            return []
        received = []
        for name in parameter.hf_names:
            buffer = torch.empty(self.shapes[name], dtype=dtype, device=runtime.device())
            dist.recv(buffer, src=dist.get_global_rank(self.groups.pp, stage), group=self.groups.pp)
            received.append(buffer)
        return received
