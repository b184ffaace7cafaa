"""vLLM's weight transfer over gloo, for machines without NCCL.

Both ends of vLLM's weight-transfer API: the worker's engine and the trainer's. The trainer's rank 0 packs full tensors into
byte buckets and broadcasts them to the workers of every vLLM engine; both ends cut the buckets from the same metadata.
Each bucket is followed by its CRC-32, so that a half-written or garbled model never passes for a whole one.

Nobody is left waiting after a fault. A worker that cannot load a bucket receives the rest before it reports, so the group
stays usable; a sender that cannot send exhausts its source, so the other trainer ranks leave the source's collectives.
"""

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

# How long after a broken broadcast the workers' own account of it may arrive.
EXPLANATION_SECONDS = 10.0


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What a worker needs to join. `rank_offset` is the group rank of its vLLM engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The stream of one update, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """The trainer's side. `world_size` counts the sender and every vLLM worker."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    world_size: int
    bucket_bytes: int
    timeout_seconds: float


def join_group(store: TCPStore, rank: int, world_size: int, timeout_seconds: float) -> dist.ProcessGroupGloo:
    """A gloo group beside torch.distributed's default one. Its operations fail after `timeout_seconds`."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, timeout)


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Broadcast `tensor` from rank 0, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    cast(Any, group).broadcast([tensor], options).wait()


def buckets(metadata: list[ParamMeta], bucket_bytes: int) -> Iterator[list[ParamMeta]]:
    """Consecutive tensors of at most `bucket_bytes` together; a larger tensor has a bucket of its own."""
    bucket: list[ParamMeta] = []
    size = 0
    for meta in metadata:
        if bucket and size + num_bytes(meta) > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(meta)
        size += num_bytes(meta)
    if bucket:
        yield bucket


def num_bytes(meta: ParamMeta) -> int:
    """Size of a tensor on the wire."""
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def checksum(data: torch.Tensor) -> torch.Tensor:
    """CRC-32 of a byte tensor, as an int64 tensor [1]."""
    return torch.tensor([zlib.crc32(cast(Any, data.numpy()))])


def repack_heads(model: torch.nn.Module) -> None:
    """Bring the output heads' packed copies up to date with their weights.

    On the CPU vLLM computes logits from a packed copy. A tied head loads nothing of its own, so the layerwise reload passes
    it over: its weight, which is the embedding's, is new, and its packed copy is that of the model it started with.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A vLLM worker's end: receives buckets and loads them by vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: dist.ProcessGroupGloo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group."""
        timeout = timedelta(seconds=init_info.timeout_seconds)
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._rank, self._bucket_bytes = rank, init_info.bucket_bytes
        self._group = join_group(store, rank, init_info.world_size, init_info.timeout_seconds)

    def start_weight_update(self) -> None:
        """Prepare the model for checkpoint-format weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Process what the layers still hold."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update. Unlike the base class, without synchronizing an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load every bucket.

        Raises:
            RuntimeError: a bucket that did not arrive, is garbled, or was refused by the model, named by its first tensor.
        """
        columns = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        metadata = [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns]
        fault: RuntimeError | None = None
        for bucket in buckets(metadata, self._bucket_bytes):
            data = torch.empty(sum(map(num_bytes, bucket)), dtype=torch.uint8)
            expected = torch.empty(1, dtype=torch.int64)
            try:
                broadcast(self._group, data)
                broadcast(self._group, expected)
            except RuntimeError as error:
                raise fault or RuntimeError(self._at(bucket, f"did not arrive: {error}")) from error
            if fault is not None:
                continue
            if not torch.equal(checksum(data), expected):
                fault = RuntimeError(self._at(bucket, "is wrong", "the checksum of "))
                continue
            try:
                self._load(bucket, data)
            except Exception as error:  # the model's own loader, of any kind
                fault = RuntimeError(self._at(bucket, f"was not loaded: {type(error).__name__}: {error}"))
        if fault is not None:
            raise fault

    def _at(self, bucket: list[ParamMeta], what: str, of: str = "") -> str:
        return f"weight transfer, worker rank {self._rank}: {of}the bucket that starts with {bucket[0].name} {what}"

    def _load(self, bucket: list[ParamMeta], data: torch.Tensor) -> None:
        parts = data.split([num_bytes(meta) for meta in bucket])
        cast(Any, self.model).load_weights(
            # A copy of each: inside the bucket it may lie where its dtype cannot be read.
            [(m.name, part.clone().view(m.dtype).view(m.shape)) for m, part in zip(bucket, parts, strict=True)]
        )

    def shutdown(self) -> None:
        """Nothing to do: the group goes with the worker's process."""


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's end. Rank 0 sends; other ranks iterate the source to join its collectives."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, init_info: GlooTrainerInitInfo, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.source: WeightSource = source
        self.init_info = init_info

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> "GlooTrainerEngine":
        """Open the endpoint on the sender, and have every worker join it."""
        if source is None:
            raise ValueError("weight transfer over gloo needs a WeightSource")
        engine = cls(init_info, client, source)
        if engine.is_sender:
            engine._rendezvous()
        return engine

    def _rendezvous(self) -> None:
        info = self.init_info
        timeout = timedelta(seconds=info.timeout_seconds)
        # Port 0: the store binds a free one, and no other process can take it in between.
        self._store = TCPStore(info.master_address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        worker = GlooInitInfo(
            master_address=info.master_address,
            master_port=self._store.port,
            rank_offset=1,
            world_size=info.world_size,
            bucket_bytes=info.bucket_bytes,
            timeout_seconds=info.timeout_seconds,
        )
        with ThreadPoolExecutor(max_workers=1) as executor:
            joined = executor.submit(self.client.init_weight_transfer_engine, asdict(worker))
            try:
                self._group = join_group(self._store, 0, info.world_size, info.timeout_seconds)
            except RuntimeError as error:
                raise RuntimeError(f"the vLLM workers did not join: {_explanation(joined) or error}") from error
            joined.result()

    def send_weights(self) -> None:
        """Send one whole update.

        Raises:
            RuntimeError: what failed first, on the workers or on the wire.
        """
        metadata = self.source.metadata()
        stream = iter(self.source)
        try:
            if self.is_sender:
                self._send(metadata, stream)
        finally:
            # Other ranks have nothing else to do; after a failure they are in the collectives of this stream.
            for _ in stream:
                pass

    def _send(self, metadata: list[ParamMeta], stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        update = GlooUpdateInfo(
            names=[m.name for m in metadata],
            dtype_names=[str(m.dtype).removeprefix("torch.") for m in metadata],
            shapes=[list(m.shape) for m in metadata],
        )
        self.client.start_weight_update()
        executor = ThreadPoolExecutor(max_workers=1)
        received = executor.submit(self.client.update_weights, asdict(update))
        try:
            self._send_buckets(metadata, stream)
        except BrokenBroadcast as error:
            raise RuntimeError(f"weight transfer failed: {_explanation(received) or error}") from error
        finally:
            executor.shutdown(wait=False)
        received.result()
        self.client.finish_weight_update()

    def _send_buckets(self, metadata: list[ParamMeta], stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        for bucket in buckets(metadata, self.init_info.bucket_bytes):
            parts = []
            for meta in bucket:
                name, tensor = next(stream, (None, None))
                if tensor is None:
                    raise RuntimeError(f"the weight source ended before {meta.name}")
                if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, tuple(meta.shape)):
                    raise RuntimeError(f"the weight source yielded {name}, but its metadata says {meta}")
                parts.append(tensor.detach().cpu().contiguous().flatten().view(torch.uint8))
            data = torch.cat(parts)
            try:
                broadcast(self._group, data)
                broadcast(self._group, checksum(data))
            except RuntimeError as error:
                raise BrokenBroadcast(f"the bucket that starts with {bucket[0].name} was not sent: {error}") from error
        if (extra := next(stream, None)) is not None:
            raise RuntimeError(f"the weight source yielded {extra[0]}, which its metadata lacks")


class BrokenBroadcast(RuntimeError):
    """A worker closed its connection, or took nothing within the time-out."""


def _explanation(received: Future) -> BaseException | None:
    """The workers' own words are worth more than "connection closed by peer"."""
    try:
        return received.exception(timeout=EXPLANATION_SECONDS)
    except TimeoutError:
        return None
