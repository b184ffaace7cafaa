"""Log-probs of many micro-batches through one pipeline schedule, against one micro-batch at a time.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --output pipeline.json

Two pipeline stages of a random Llama (SmolLM2-135M's width), each a process with one thread, over gloo on a CPU or NCCL on
two GPUs. One at a time, each stage waits while the other works; through one schedule they work side by side, and the limit
for two stages is a ratio of 2 x micro-batches / (micro-batches + 1).
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from harness import in_turn, report, run_ranks

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout

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


def stage(folder: str, micro_batches: int, rounds: int) -> dict[str, float]:
    """One rank: median wall-clock seconds of both ways. CPU seconds would not show that a stage waits."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
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

    one_schedule()
    times = in_turn({"one schedule": one_schedule, "one at a time": one_at_a_time}, rounds)
    runtime.finalize()
    return {name: taken["wall"] for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("pipeline.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        figures: dict = run_ranks(STAGES, stage, folder, args.micro_batches, args.rounds)[0]
    figures["ratio"] = figures["one at a time"] / figures["one schedule"]
    figures["limit"] = STAGES * args.micro_batches / (args.micro_batches + STAGES - 1)
    report([figures], args.output)


if __name__ == "__main__":
    main()
