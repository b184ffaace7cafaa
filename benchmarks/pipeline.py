"""Log-probs of many micro-batches through one pipeline schedule, against one micro-batch at a time.

    python benchmarks/pipeline.py [--micro_batches 16] [--repeats 5] [--output pipeline.json]

Two pipeline stages of a random Llama (SmolLM2-135M's width), each a process with one thread, over gloo on a CPU or NCCL on
two GPUs. One at a time, each stage waits while the other works; through one schedule they work side by side, and the limit
for two stages is a ratio of 2 x micro-batches / (micro-batches + 1).
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

STAGES = 2
TOKENS = 256  # of each micro-batch


def save_model(folder: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def stage(rank: int, port: int, folder: str, micro_batches: int, repeats: int, results) -> None:
    """One rank: both ways in turn, so that other work on the machine meets both; puts the medians into `results`."""
    from gapo_megatron.megatron import runtime
    from gapo_megatron.megatron.batch import Rollout
    from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
    from gapo_megatron.megatron.layout import ParallelLayout

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(STAGES))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    layout = ParallelLayout(STAGES, pipeline_model_parallel_size=STAGES)
    runtime.initialize(layout)
    engine = PolicyEngine(folder, EngineConfig(layout, max_tokens=TOKENS))
    mask = torch.ones(TOKENS - 1, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    rollouts = [Rollout(torch.randint(0, 8192, (TOKENS,), generator=generator), mask) for _ in range(micro_batches)]

    def one_schedule() -> None:
        engine.log_probs(rollouts)

    def one_at_a_time() -> None:
        for rollout in rollouts:
            engine.log_probs([rollout])

    seconds: dict[str, list[float]] = {"one_schedule": [], "one_at_a_time": []}
    one_schedule()
    for _ in range(repeats):
        for way in (one_schedule, one_at_a_time):
            torch.distributed.barrier()
            start = time.perf_counter()
            way()
            torch.distributed.barrier()
            seconds[way.__name__].append(time.perf_counter() - start)
    runtime.finalize()
    if rank == 0:
        results.put({name: statistics.median(values) for name, values in seconds.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        mp.spawn(stage, (port, folder, args.micro_batches, args.repeats, results), nprocs=STAGES)
    figures = results.get()
    figures["ratio"] = figures["one_at_a_time"] / figures["one_schedule"]
    figures["limit"] = STAGES * args.micro_batches / (args.micro_batches + STAGES - 1)
    print(f"one schedule  {figures['one_schedule']:8.3f} s")
    print(f"one at a time {figures['one_at_a_time']:8.3f} s")
    print(f"ratio         {figures['ratio']:8.2f}   (limit {figures['limit']:.2f})")
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
