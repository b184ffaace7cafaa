"""Seconds to give a running vLLM engine new weights, against the ways without a weight transfer.

- transfer: `WeightSync.send` of a transformers model in bf16 to one engine, from start to servable;
- memory: one plain copy of the same bytes, the floor of anything that moves them;
- checksum: CRC-32 of the same bytes, which each end computes once;
- save and restart: `save_pretrained` to a folder, and a fresh engine from it, which is what the transfer replaces.

    python benchmarks/weight_sync.py --model MODEL_FOLDER --output weight_sync.json

Starts its own Ray; CPU or GPU; about two minutes on two cores.
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer.base import ModuleSource

from gapo_megatron.demo.one_engine import start_engine
from gapo_megatron.demo.private_ray import private_ray
from gapo_megatron.sync.gloo_engine import checksum
from gapo_megatron.sync.weight_sync import WeightSync


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall-clock time of `action`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(folder: str, bucket_mb: float, repeats: int) -> dict[str, float]:
    """All figures for the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if torch.cuda.is_available():
        model.cuda()
    engine = start_engine(folder)
    sync = WeightSync(ModuleSource(model), [engine], rank=0, bucket_mb=bucket_mb)
    sync.send(1)  # the first one also allocates
    result = {"transfer": seconds(lambda: sync.send(2), repeats)}
    ray.kill(engine)
    flat = torch.cat([p.detach().flatten().view(torch.uint8) for p in model.parameters()]).cpu()
    result["megabytes"] = flat.numel() / 1e6
    result["memory"] = seconds(flat.clone, repeats)
    result["checksum"] = seconds(lambda: checksum(flat), repeats)

    def save_and_restart() -> None:
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            AutoTokenizer.from_pretrained(folder).save_pretrained(saved)
            ray.kill(start_engine(saved))

    result["save and restart"] = seconds(save_and_restart, 1)
    result["restart / transfer"] = result["save and restart"] / result["transfer"]
    result["transfer MB/s"] = result["megabytes"] / result["transfer"]
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder with a tokenizer")
    parser.add_argument("--output", type=Path, default=Path("weight_sync.json"))
    parser.add_argument("--bucket_mb", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, private_ray(2, 4, Path(folder) / "ray.log") as address:
        ray.init(address=address, log_to_driver=False)
        result = measure(args.model, args.bucket_mb, args.repeats)
        ray.shutdown()
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
