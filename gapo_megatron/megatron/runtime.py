"""The device runtime: CUDA with NCCL, or CPU with gloo.

Megatron-Core 0.16 names CUDA unconditionally (`torch.cuda.current_device()`, `device="cuda"`, `Tensor.type() ==
"torch.cuda.FloatTensor"`). On a machine without CUDA `install_cpu_shim` makes those names mean the CPU. This module is
the only one that touches global torch state; everything else takes its device from `device()`.
"""

import functools
import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from gapo_megatron.megatron.layout import ParallelLayout

# Megatron's default. Processes are block-contiguous instead and take the rank that `ParallelLayout.megatron_rank` says.
RANK_ORDER = "tp-cp-ep-dp-pp"

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "randint",
    "tensor",
    "zeros",
    "zeros_like",
)


def device() -> torch.device:
    """The device of this process: its current CUDA device, or the CPU."""
    if _has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend that serves `device()`."""
    return "nccl" if _has_cuda() else "gloo"


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _is_cuda(value: object) -> bool:
    return value is not None and str(value).startswith("cuda")


def _on_cpu(function):
    """Wrap a tensor factory so that `device="cuda"` makes a CPU tensor."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return wrapper


_shim_installed = False


def install_cpu_shim() -> None:
    """Make the names of CUDA mean the CPU in this process. Does nothing where CUDA exists, or on a second call."""
    global _shim_installed
    if _has_cuda() or _shim_installed:
        return
    _shim_installed = True

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]
    for name in ("synchronize", "set_device", "empty_cache", "manual_seed", "manual_seed_all", "ipc_collect"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)

    # `with torch.device("meta")` knows the factories by identity and collects them on first use: let it be before they are
    # wrapped. Otherwise transformers builds real tensors there, and leaves rotary frequencies uninitialized.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    original_type, original_to = torch.Tensor.type, torch.Tensor.to

    def tensor_type(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.")
        return original_type(self, dtype, *args, **kwargs)

    def tensor_to(self, *args, **kwargs):
        args = tuple("cpu" if isinstance(a, str | torch.device) and _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)  # pyright: ignore

    torch.Tensor.type = tensor_type  # type: ignore[method-assign]
    torch.Tensor.to = tensor_to  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _shim_uneven_collectives()
    _shim_streams()
    _shim_megatron_rng()


def _shim_uneven_collectives() -> None:
    """Experts under tensor parallelism gather and scatter unequal numbers of tokens, which gloo refuses."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def even(tensors: list[torch.Tensor]) -> bool:
        return len({t.shape for t in tensors}) == 1

    def gather(tensor_list, tensor, group=None, async_op=False):
        if even(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for i, part in enumerate(tensor_list):
            dist.broadcast(part, group_src=i, group=group)

    def scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if even(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        parts = [part.clone() for part in input_list]
        for i, part in enumerate(parts):
            dist.reduce(part, group_dst=i, op=op, group=group)
        output.copy_(parts[dist.get_rank(group)])

    dist.all_gather, dist.reduce_scatter = gather, scatter


class _NoStream:
    """A CPU's only stream: everything on it has happened already. Also the event that it records."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self


def _shim_streams() -> None:
    """The token dispatcher of mixtures of experts copies counts to the host on a stream of its own."""
    from megatron.core.transformer.moe import token_dispatcher

    torch.cuda.Stream = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = _NoStream  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]

    def counts_on_host(tensor, as_numpy: bool = False, record_stream: bool = False):
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts_on_host


def _shim_megatron_rng() -> None:
    """Activation recompute saves and restores a CUDA generator; the models here draw no random number on a device."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _complete_megatron() -> None:
    """Without Transformer Engine, Megatron's router reads a name that it has not defined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore


def initialize(layout: ParallelLayout, timeout_minutes: float = 10.0) -> None:
    """Join the process group and build Megatron's groups. Rank, world size and address come from the environment.

    `dist.get_rank()` is Megatron's rank afterwards, not the environment's; process 0 is rank 0 in both.

    Raises:
        ValueError: `layout.world_size` is not the number of processes.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    install_cpu_shim()
    _complete_megatron()
    timeout = timedelta(minutes=timeout_minutes)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != layout.world_size:
        raise ValueError(f"the layout is for {layout.world_size} ranks, but {world_size} were started")
    dist.init_process_group(backend(), timeout=timeout, rank=layout.megatron_rank(rank), world_size=world_size)
    virtual = layout.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        order=RANK_ORDER,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    # Policies are trained without dropout, so the tracker whose fork() is a no-op serves both devices.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def finalize() -> None:
    """Leave Megatron's groups and the process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
