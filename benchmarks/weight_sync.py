"""Seconds to give a running vLLM engine new weights, against the ways without a weight transfer.

- transfer: `WeightSync.send` of a transformers model in bf16 to one engine, from start to servable;
- memory: one plain copy of the same bytes, the floor of anything that moves them;
- checksum: CRC-32 of the same bytes, which each end computes once;
- save and restart: `save_pretrained` to a folder, and a fresh engine from it, which is what the transfer replaces.

    python benchmarks/weight_sync.py --output weight_sync.json

Two random Llamas: a tiny one, and one of SmolLM2-135M's shape. Starts its own Ray; CPU or GPU; some minutes on two cores.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from vllm.distributed.weight_transfer.base import ModuleSource

from gapo_megatron.demo.private_ray import private_ray
from gapo_megatron.sync.gloo_engine import checksum
from gapo_megatron.sync.weight_sync import WeightSync
from tests.tiny_models import save_tiny_policy

SMOLLM2_135M = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
READY_SECONDS = 600


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall-clock time of `action`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def start_engine(folder: str):
    """A vLLM engine of OpenRLHF's own class that is ready to serve."""
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    engine = create_vllm_engines(1, 1, folder, 0, False, False, True, 256, gpu_memory_utilization=0.5)[0]
    ray.get(engine.weight_version.remote(), timeout=READY_SECONDS)
    return engine


def measure(model: PreTrainedModel, folder: str, bucket_mb: float, repeats: int) -> dict[str, float]:
    """All figures for one model, whose folder holds a tokenizer."""
    engine = start_engine(folder)
    source = ModuleSource(model)
    sync = WeightSync(source, [engine], rank=0, bucket_mb=bucket_mb)
    sync.send(1)  # the first one also allocates
    result = {"transfer": seconds(lambda: sync.send(2), repeats)}
    ray.kill(engine)
    flat = torch.cat([p.detach().flatten().view(torch.uint8) for p in model.parameters()])
    result["megabytes"] = flat.numel() / 1e6
    result["memory"] = seconds(flat.clone, repeats)
    result["checksum"] = seconds(lambda: checksum(flat), repeats)

    def save_and_restart() -> None:
        model.save_pretrained(folder)
        ray.kill(start_engine(folder))

    result["save and restart"] = seconds(save_and_restart, 1)
    result["restart / transfer"] = result["save and restart"] / result["transfer"]
    result["transfer MB/s"] = result["megabytes"] / result["transfer"]
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("weight_sync.json"))
    parser.add_argument("--bucket_mb", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, private_ray(8, 16, Path(folder) / "ray.log") as address:
        ray.init(address=address, log_to_driver=False)
        tiny = save_tiny_policy(Path(folder))
        large = str(Path(folder) / "smollm2-135m-shape")
        model = AutoModelForCausalLM.from_config(SMOLLM2_135M, dtype=torch.bfloat16)
        model.save_pretrained(large)
        AutoTokenizer.from_pretrained(tiny).save_pretrained(large)
        models = {tiny: AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16), large: model}
        result = {Path(f).name: measure(m, f, args.bucket_mb, args.repeats) for f, m in models.items()}
        ray.shutdown()
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
