"""Device memory that a rank gives back between phases, while vLLM or another model uses the same device."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from gapo_megatron.megatron import runtime

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


class DeviceMemory:
    """The large device storages of one rank, which can be emptied and filled again.

    - parameters: Megatron's parameter buffers;
    - gradients: its gradient buffers; their content is dropped, because every mini-batch starts from zero;
    - optimizer: fp32 masters and moments.

    Storages are emptied in place, so whatever shares them (parameters, buckets, fp32 masters that are views of parameters)
    still does so afterwards. Megatron's own `offload_to_cpu` of an optimizer puts other tensors in their place, which cuts
    such views, and that of a parameter buffer loses the values where the device is the CPU.

    Args:
        chunks: this rank's model chunks.
        optimizer: over all of them.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._chunks: list[Any] = list(chunks)
        self._optimizers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        # Part -> its emptied storages, and their bytes on the host (pinned where there is CUDA) except for gradients
        self._offloaded: dict[Part, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def offload(self, *parts: Part) -> None:
        """Empty the device storages of `parts` (all of them when none is named), except those that are empty already."""
        torch.cuda.synchronize()  # nothing may still use them, on any stream
        for part in parts or PARTS:
            if part not in self._offloaded:
                self._offloaded[part] = self._empty(part)
        torch.cuda.empty_cache()  # the caching allocator would keep them from other processes

    def reload(self, *parts: Part) -> None:
        """Fill the device storages of `parts` (all of them when none is named), except those that are not empty."""
        for part in parts or PARTS:
            if part in self._offloaded:
                self._fill(part, self._offloaded.pop(part))
        torch.cuda.synchronize()

    def require(self, *parts: Part) -> None:
        """Raises RuntimeError when one of `parts` is offloaded."""
        if missing := [part for part in parts if part in self._offloaded]:
            raise RuntimeError(f"the engine is offloaded ({', '.join(missing)}); call reload() before using it")

    def _empty(self, part: Part) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        if part == "gradients":
            for chunk in self._chunks:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
            return []
        storages = self._parameter_storages() if part == "parameters" else self._optimizer_storages()
        copies = [(storage, _to_host(storage)) for storage in storages]
        torch.cuda.synchronize()
        for storage, _ in copies:
            storage.resize_(0)
        return copies

    def _fill(self, part: Part, copies: list[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
        if part == "gradients":
            for chunk in self._chunks:
                chunk.restore_grad_buffers(synchronize=False)
        for storage, host in copies:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)

    def _parameter_storages(self) -> list[torch.UntypedStorage]:
        return _storages(buffer.param_data for buffer in self._buffers())

    def _optimizer_storages(self) -> list[torch.UntypedStorage]:
        """Masters and moments on the device, without what they share with the parameters (fp32 parameters have no master
        of their own)."""
        inner: list[Any] = [o.optimizer for o in self._optimizers if o.optimizer is not None]
        masters = [p for o in inner for group in o.param_groups for p in group["params"]]
        moments = [value for o in inner for state in o.state.values() for value in state.values()]
        parameters = {b.param_data.untyped_storage()._cdata for b in self._buffers() if b.param_data is not None}
        return [s for s in _storages([*masters, *moments]) if s._cdata not in parameters]

    def _buffers(self) -> list[Any]:
        return [b for chunk in self._chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


def require_resident(parameter: torch.nn.Parameter) -> None:
    """Raises RuntimeError when the parameters of the engine that `parameter` belongs to are offloaded."""
    if not parameter.untyped_storage().nbytes():
        raise RuntimeError("the engine is offloaded (parameters); call reload() before using it")


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """The storages of those `values` that are tensors on this rank's device, each once."""
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.device.type == runtime.device().type]
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=runtime.device().type == "cuda")
    return host.copy_(_bytes_of(storage), non_blocking=True)
