"""Megatron's weight export as the `WeightSource` of vLLM's weight-transfer API."""

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from gapo_megatron.megatron.weights.export import WeightExport


class MegatronSource(WeightSource):
    """Full Hugging Face tensors, one at a time, on rank 0; the other ranks' iteration joins the collectives."""

    def __init__(self, export: WeightExport) -> None:
        self._export = export

    def metadata(self) -> list[ParamMeta]:
        """Every tensor of the stream, in order, without transferring any."""
        return [ParamMeta(*meta) for meta in self._export.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._export)
