"""Megatron's weight export as the `WeightSource` of vLLM's weight-transfer API."""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.weights.export import WeightExport
from gapo_megatron.sync.backend import Backend


class MegatronSource(WeightSource):
    """Full Hugging Face tensors, one at a time, on rank 0; the other ranks' iteration joins the collectives."""

    def __init__(self, export: WeightExport) -> None:
        self._export = export

    def metadata(self) -> list[ParamMeta]:
        """Every tensor of the stream, in order, without transferring any."""
        return [ParamMeta(*meta) for meta in self._export.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._export)


class EveryRankSource(MegatronSource):
    """The same tensors on every rank, because a vLLM worker takes them from the trainer rank on its own device.

    Adds one broadcast per tensor over the default group. All ranks iterate in lockstep.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        metadata = iter(self.metadata())
        for (parameter, _), step in zip(self._export.local, self._export.steps(), strict=True):
            on_first_rank = dict(step)
            for meta in itertools.islice(metadata, len(parameter.hf_names)):
                tensor = on_first_rank.get(meta.name)
                if tensor is None:
                    tensor = torch.empty(meta.shape, dtype=meta.dtype, device=runtime.device())
                tensor = tensor.contiguous()
                dist.broadcast(tensor, src=0)
                yield meta.name, tensor


def megatron_source(export: WeightExport, backend: Backend) -> MegatronSource:
    """The source that `backend` needs."""
    return EveryRankSource(export) if backend == "ipc" else MegatronSource(export)
