"""Both ends of the gloo weight transfer, over a real gloo group, without vLLM's engine around them.

`tests/e2e/test_weight_transfer.py` has the same transfer into a running vLLM.
"""

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.sync import gloo_engine
from gapo_megatron.sync.gloo_engine import (
    GlooInitInfo,
    GlooTrainerEngine,
    GlooTrainerInitInfo,
    GlooWeightTransferEngine,
    buckets,
    num_bytes,
)

SHAPES = {"a": (3, 5), "b": (7,), "large": (40, 10), "c": (2, 2), "empty.d": (0, 4), "e": (1,)}
DTYPES = (torch.float32, torch.bfloat16)
TIMEOUT = 10.0


class RandomWeights(WeightSource):
    """A fixed stream; `wrong` names a tensor whose shape differs from what the metadata says."""

    def __init__(self, wrong: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(DTYPES[i % 2])
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        self.wrong = wrong

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self):
        for name, tensor in self.tensors.items():
            yield name, tensor[:1] if name == self.wrong else tensor


class Client:
    """vLLM's control plane, carried by the default process group to the ranks that play workers."""

    def __getattr__(self, name: str):
        def call(*args) -> None:
            dist.broadcast_object_list([(name, *args)], src=0)

        return call


def trainer(bucket_bytes: int, wrong: str | None = None) -> str:
    info = GlooTrainerInitInfo(
        rank=0,
        master_address="127.0.0.1",
        world_size=dist.get_world_size(),
        bucket_bytes=bucket_bytes,
        timeout_seconds=TIMEOUT,
    )
    engine = GlooTrainerEngine.trainer_init(info, client=Client(), source=RandomWeights(wrong))
    try:
        engine.send_weights()
    except RuntimeError as error:
        return str(error)
    return "sent"


def worker(corrupt: int | None = None):
    """Plays a vLLM worker; returns what arrived, or the error. `corrupt` is the bucket in which a bit flips on the way."""
    received: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=received.update)
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=dist.get_rank() - 1), model_config=None)
    engine = GlooWeightTransferEngine(None, vllm_config, torch.device("cpu"), model)
    original, calls = gloo_engine.broadcast, []

    def flip(group, tensor):
        original(group, tensor)
        calls.append(tensor)
        if corrupt is not None and len(calls) == 2 * corrupt + 1:
            tensor[0] ^= 1

    gloo_engine.broadcast = flip
    result: dict[str, torch.Tensor] | str = received
    while True:
        message = [None]
        dist.broadcast_object_list(message, src=0)
        name, *args = message[0]
        try:
            if name == "init_weight_transfer_engine":
                engine.init_transfer_engine(GlooInitInfo(**args[0]))
            elif name == "update_weights":
                engine.update_weights(args[0])
        except RuntimeError as error:
            result = str(error)
        if name == "finish_weight_update":
            gloo_engine.broadcast = original
            return result


def transfer(bucket_bytes: int, wrong: str | None = None, corrupt: int | None = None):
    runtime.initialize(ParallelLayout(int(os.environ["WORLD_SIZE"])), timeout_minutes=1)
    if dist.get_rank() != 0:
        return worker(corrupt if dist.get_rank() == 2 else None)
    result = trainer(bucket_bytes, wrong)
    if result != "sent":
        time.sleep(TIMEOUT + 2)  # our end stays open, as that of a trainer that hangs would
        Client().finish_weight_update()
    return result


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_worker_receives_every_tensor_exactly(ranks, bucket_bytes):
    sent, *workers = ranks.run(3, transfer, bucket_bytes)
    assert sent == "sent"
    expected = RandomWeights().tensors
    for received in workers:
        assert list(received) == list(expected)
        assert all(torch.equal(received[n], t) and received[n].dtype == t.dtype for n, t in expected.items())


def test_a_flipped_bit_is_found_and_its_bucket_is_named(ranks):
    sent, good, bad = ranks.run(3, transfer, 100, None, 1)
    assert sent == "sent"  # the control plane, which vLLM's engines answer, is what reports it
    assert "a" in good
    second = list(buckets(RandomWeights().metadata(), 100))[1][0].name
    assert bad == f"weight transfer, worker rank 2: the checksum of the bucket that starts with {second} is wrong"


def test_a_source_that_contradicts_its_metadata_is_an_error_that_names_the_tensor(ranks):
    sent, waiting = ranks.run(2, transfer, 1 << 20, "large", timeout=60)
    assert "the weight source yielded large, but its metadata says" in sent
    assert "imed out" in waiting  # nothing came, and it did not wait for ever


def test_buckets_keep_the_order_and_the_limit():
    metadata = RandomWeights().metadata()
    cut = list(buckets(metadata, 100))
    assert [m for bucket in cut for m in bucket] == metadata
    assert all(len(bucket) == 1 or sum(map(num_bytes, bucket)) <= 100 for bucket in cut)
