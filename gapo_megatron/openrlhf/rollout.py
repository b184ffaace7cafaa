"""What a vLLM engine of OpenRLHF gains: weight transfer, a weight version on every rollout, and arguments for the CPU."""

import os
from typing import Any

import torch

from gapo_megatron.openrlhf.colocation import engine_shares_device
from gapo_megatron.sync.backend import transfer_backend

VERSION_KEY = "weight_version"


class WeightTransferMixin:
    """Base of OpenRLHF's `RolloutRayActor`; `self.llm` is its vLLM AsyncLLM.

    Between `start_weight_update` and `finish_weight_update` the model is not whole, and `check_servable` raises. That also
    holds after a transfer that failed half-way, until another one succeeds.
    """

    llm: Any
    _weight_version = 0
    _whole = True
    _paused = False

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's workers join the trainer's transfer group."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        """Begin an update, also after one that was abandoned. Requests in flight finish first, on the old weights."""
        abandoned, self._whole = not self._whole, False
        if not await self.llm.is_paused():  # a caller that paused it holds requests back, which would never finish
            await self.llm.pause_generation(mode="wait")
            self._paused = True
        if abandoned:
            await self.llm.collective_rpc(_abandon_update)
        await self.llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one stream of weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Serve the new weights as `version`; keys and values of the old ones are dropped."""
        await self.llm.finish_weight_update(str(version))
        # Also of requests that a caller holds back: they are computed anew.
        await self.llm.reset_prefix_cache(reset_running_requests=True)
        if self._paused:
            await self.llm.resume_generation()
        self._weight_version, self._whole, self._paused = version, True, False

    async def weight_version(self) -> int:
        """The version of the weights that are served; 0 for those of the model's folder."""
        return self._weight_version


def _abandon_update(worker: Any) -> None:
    worker._weight_update_active = False


def check_servable(engine: WeightTransferMixin) -> None:
    """Refuse to generate from a model that is not whole.

    Raises:
        RuntimeError: an update has started and not finished.
    """
    if not engine._whole:
        raise RuntimeError(
            f"the weights after version {engine._weight_version} did not arrive whole; nothing is generated from them"
        )


def stamp(engine: WeightTransferMixin, responses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the engine's weight version into each response; it travels on in `Experience.info["weight_version"]`."""
    for response in responses:
        response["extra_logs"] = {**(response.get("extra_logs") or {}), VERSION_KEY: engine._weight_version}
    return responses


def engine_kwargs(actor_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a vLLM engine: with weight transfer configured, and fit for the CPU where there is no CUDA.

    Raises:
        ValueError: sleep mode without CUDA.
    """
    kwargs = {**actor_kwargs, "weight_transfer_config": {"backend": transfer_backend(engine_shares_device())}}
    if torch.cuda.is_available():
        return kwargs
    if actor_kwargs.get("enable_sleep_mode"):
        raise ValueError("--vllm.enable_sleep needs CUDA: there is no device memory to give back; leave it out")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # vLLM's default leaves cores to a serving front end; rollouts want them all.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", threads_bind(actor_kwargs.get("tensor_parallel_size", 1)))
    # On the CPU it is a share of the machine's memory, checked against what is free; VLLM_CPU_KVCACHE_SPACE decides.
    kwargs.pop("gpu_memory_utilization", None)
    return kwargs


def threads_bind(workers: int) -> str:
    """The cores of this process as vLLM's VLLM_CPU_OMP_THREADS_BIND: one list a worker, shared where they are too few."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    starts = [i * share % len(cores) for i in range(workers)]
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)
