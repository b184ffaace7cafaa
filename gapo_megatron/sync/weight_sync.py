"""The trainer's weights to every vLLM engine, through vLLM's weight-transfer API."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from gapo_megatron.sync import plugin
from gapo_megatron.sync.backend import BACKENDS, Backend, transfer_backend
from gapo_megatron.sync.gloo_engine import GlooTrainerInitInfo, num_bytes


class RayEngines:
    """vLLM's `VLLMWeightSyncClient` protocol over Ray handles of `openrlhf.rollout.WeightTransferMixin` actors.

    Every call goes to all engines and waits for all of them, for `timeout_seconds` at most.
    """

    def __init__(self, handles: Sequence[Any], workers_per_engine: int, timeout_seconds: float) -> None:
        self.handles = list(handles)
        self.workers_per_engine = workers_per_engine
        self.timeout_seconds = timeout_seconds
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have each engine's workers join, at their own ranks of the group where there is one (CUDA IPC has none)."""
        infos = [dict(init_info) for _ in self.handles]
        if "rank_offset" in init_info:
            for i, info in enumerate(infos):
                info["rank_offset"] += i * self.workers_per_engine
        self._wait(
            "init_weight_transfer_engine",
            [h.init_weight_transfer_engine.remote(info) for h, info in zip(self.handles, infos, strict=True)],
        )

    def start_weight_update(self) -> None:
        """From here on the engines refuse to generate."""
        self._wait("start_weight_update", [h.start_weight_update.remote() for h in self.handles])

    def update_weights(self, update_info: Any) -> None:
        """Receive one stream of weights."""
        self._wait("update_weights", [h.update_weights.remote(update_info) for h in self.handles])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights are whole: serve them, as `version`."""
        self._wait("finish_weight_update", [h.finish_weight_update.remote(self.version) for h in self.handles])

    def _wait(self, what: str, references: list[Any]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        pending = references
        while pending:  # in the order in which they answer, so that the first failure is the one that is told
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                silent = [references.index(r) for r in pending]
                raise RuntimeError(f"vLLM engines {silent} did not answer {what} within {self.timeout_seconds:.0f} s")
            try:
                ray.get(done)
            except RayError as error:
                engine = references.index(done[0])
                raise RuntimeError(f"vLLM failed in {what} (engine {engine}): {error}") from error


class WeightSync:
    """Weight transfer of one trainer. Constructed, and `send` called, on every trainer rank in lockstep.

    Args:
        source: of full, Hugging Face-named tensors; real ones on rank 0, with "ipc" on every rank.
        engines: Ray handles of the vLLM engines.
        rank: of this trainer process; 0 sends.
        workers_per_engine: vLLM's tensor-parallel size.
        bucket_mb: bytes in flight at one time, in MiB.
        timeout_seconds: after which anything that has not answered is an error.
        backend: the one that the engines were started with (`rollout.engine_kwargs`); None for engines on devices of
            their own.

    After a failed `send` no engine serves until a whole one lands. If the group itself broke (a time-out), construct
    another `WeightSync`: the engines join that one's group instead. With NCCL and CUDA IPC, which are vLLM's own
    engines, calls to the vLLM engines have the time-out, the transfer itself has none, and there are no checksums.

    Raises:
        ValueError: a backend that is not known.
        RuntimeError: an engine that fails or does not answer.
    """

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[Any],
        rank: int,
        workers_per_engine: int = 1,
        bucket_mb: float = 256,
        timeout_seconds: float = 600.0,
        backend: Backend | None = None,
    ) -> None:
        plugin.register()
        backend = backend or transfer_backend(shares_device=False)
        if backend not in BACKENDS:
            raise ValueError(f"weight transfer backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
        self._client = RayEngines(engines, workers_per_engine, timeout_seconds)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            _init_info(backend, source, rank, 1 + len(engines) * workers_per_engine, bucket_mb, timeout_seconds),
            client=self._client,
            source=source,
        )

    def send(self, version: int) -> None:
        """Send all weights; the engines serve them under `version` once they are whole."""
        self._client.version = version
        self._engine.send_weights()


def _init_info(
    backend: Backend, source: WeightSource, rank: int, world_size: int, bucket_mb: float, timeout_seconds: float
) -> TrainerInitInfo:
    address, bucket_bytes = ray.util.get_node_ip_address(), int(bucket_mb * 2**20)
    if backend == "gloo":
        return GlooTrainerInitInfo(
            rank=rank,
            master_address=address,
            world_size=world_size,
            bucket_bytes=bucket_bytes,
            timeout_seconds=timeout_seconds,
        )
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # One buffer, which does not grow for the largest tensor as the other engines' buckets do.
        buffer_bytes = max(bucket_bytes, *map(num_bytes, source.metadata()))
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=address,
        master_port=_free_port(),
        world_size=world_size,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
    )


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]
