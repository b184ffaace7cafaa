"""Hugging Face weights -> a sharded Megatron model -> a Hugging Face folder, byte for byte."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.weights import hf_folder
from tests.distributed.parity_matrix import is_mixture
from tests.tiny_models import CONFIGS, save_tiny_model


def round_trip(model_path: str, sizes: dict, folder: str, shard_bytes: int) -> None:
    layout = ParallelLayout(world_size=int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(layout, timeout_minutes=2)
    engine = PolicyEngine(model_path, EngineConfig(layout, torch.bfloat16))
    assert [(n, t.dtype, tuple(t.shape)) for n, t in engine.weights] in (engine.weights.metadata(), [])
    if dist.get_rank() == 0:
        hf_folder.write(folder, engine.weights, engine.hf_config, None, shard_bytes)
    else:
        assert list(engine.weights) == []


def streams(model_path: str) -> tuple[list, list]:
    """What rank 0's source and the source of every rank yield on this rank of two stages x two replicas."""
    from gapo_megatron.sync.megatron_source import megatron_source

    layout = ParallelLayout(4, pipeline_model_parallel_size=2)
    runtime.initialize(layout, timeout_minutes=2)
    weights = PolicyEngine(model_path, EngineConfig(layout, torch.bfloat16)).weights
    return tuple([(n, t.clone()) for n, t in megatron_source(weights, backend)] for backend in ("gloo", "ipc"))


def test_the_source_for_cuda_ipc_yields_every_tensor_on_every_rank(ranks, tmp_path):
    results = ranks.run(4, streams, save_tiny_model(tmp_path, "qwen2-untied", torch.bfloat16))
    expected = results[0][0]
    assert len(expected) > 40 and all(first == [] for first, _ in results[1:])
    for _, every in results:
        assert [n for n, _ in every] == [n for n, _ in expected]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(every, expected, strict=True))


def tensors(folder) -> dict[str, torch.Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


PIPELINED = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
SIZES = {
    **{name: PIPELINED for name in CONFIGS if not is_mixture(name)},
    # Each of the four ranks holds other experts or other layers.
    **{
        name: dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2) for name in CONFIGS if is_mixture(name)
    },
}
CASES = [
    *SIZES.items(),
    ("llama-tied", dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    ("llama-one-kv-head", dict(tensor_model_parallel_size=4)),
    ("mixtral", dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_round_trip_is_byte_identical(ranks, tmp_path, name, sizes):
    path = save_tiny_model(tmp_path, name, torch.bfloat16)
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}")
    (out / "model-00009-of-00009.safetensors").write_bytes(b"stale")
    ranks.run(4, round_trip, path, sizes, str(out), 100_000)
    original, written = tensors(tmp_path / path.rsplit("/", 1)[-1]), tensors(out)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[n].view(torch.int16), t.view(torch.int16)) for n, t in original.items())
    assert (out / "model.safetensors.index.json").exists() and (out / "metrics.jsonl").exists()
    assert not (out / ".incomplete").exists()
    AutoModelForCausalLM.from_pretrained(out)


def test_a_tensor_that_the_table_does_not_know_is_an_error(ranks, tmp_path):
    path = save_tiny_model(tmp_path, "qwen2", torch.bfloat16)
    from safetensors.torch import save_file

    file = tmp_path / path.rsplit("/", 1)[-1] / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.mlp.extra.weight": torch.zeros(2)}, file)
    with pytest.raises(RuntimeError, match="holds tensors that the conversion does not know: model.layers.0.mlp.extra"):
        ranks.run(1, round_trip, path, {}, str(tmp_path / "out"), 1 << 30)
