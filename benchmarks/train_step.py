"""A training step of the Megatron policy against one of OpenRLHF's own DeepSpeed actor: tokens per second.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/train_step.py --output train_step.json

One rank each, in one process and in turn, bf16, the same GAPO step on the same sequences: the Megatron policy packs them by
`--max_tokens`, OpenRLHF's actor pads micro-batches of 4 (its packing needs flash-attn). Two batches: the lengths of a real
rollout, and equal lengths with as many tokens. Tokens are real ones, of prompt and response. The last column is the time of
old log-probs over that of a training step, both ours. Some minutes on two cores.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from deepspeed_policy import DeepSpeedPolicy
from harness import clock, in_turn, report, run_ranks
from openrlhf.trainer.ppo_utils.experience import Experience

from gapo_megatron.demo.model import prepare_model
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.objective import Objective
from gapo_megatron.megatron.optimizer import OptimizerSettings
from gapo_megatron.openrlhf.rollouts import padded_log_probs, rollouts_of_batch, rollouts_of_experience

GROUP = 8
LR = 1e-6
# Tokens of 8 arithmetic prompts, and of 8 responses to each: SmolLM2-135M-Instruct at temperature 1, at most 256 new tokens.
ROLLOUT = (
    (43, (256, 41, 129, 254, 256, 256, 111, 243)),
    (37, (108, 7, 48, 84, 256, 82, 94, 144)),
    (37, (171, 256, 49, 39, 64, 55, 165, 30)),
    (38, (256, 86, 102, 256, 256, 185, 256, 81)),
    (70, (40, 27, 256, 9, 256, 37, 62, 93)),
    (49, (22, 55, 3, 68, 51, 37, 12, 24)),
    (65, (61, 256, 33, 256, 256, 35, 256, 56)),
    (65, (256, 23, 256, 168, 256, 252, 39, 91)),
)


def experience_of(lengths: list[tuple[int, int]], vocabulary: int) -> Experience:
    """Random tokens of these lengths, right-padded, in groups with a third of correct samples."""
    longest = max(prompt + response for prompt, response in lengths)
    sequences = torch.zeros(len(lengths), longest, dtype=torch.long)
    attention, actions = torch.zeros_like(sequences), torch.zeros_like(sequences[:, 1:])
    for i, (prompt, response) in enumerate(lengths):
        sequences[i, : prompt + response] = torch.randint(0, vocabulary, (prompt + response,))
        attention[i, : prompt + response] = 1
        actions[i, prompt - 1 : prompt + response - 1] = 1
    correct = (torch.arange(len(lengths)) % 3 == 0).float()
    group_correct = correct.view(-1, GROUP).sum(dim=1).repeat_interleave(GROUP)
    size = torch.full_like(correct, GROUP)
    return Experience(
        sequences=sequences,
        attention_mask=attention,
        action_mask=actions,
        advantages=(correct - group_correct / size)[:, None] * actions,
        info={"correct": correct, "group_correct": group_correct, "group_size": size},
    )


def compare(name: str, lengths: list[tuple[int, int]], model: str, max_tokens: int, rounds: int) -> dict[str, Any]:
    """A row of the table, on one rank."""
    logging.disable(logging.WARNING)
    layout, loss = ParallelLayout(1), PolicyLossConfig()
    runtime.initialize(layout)
    optimizer = OptimizerSettings(lr=LR, schedule="constant")
    engine = PolicyEngine(
        model, EngineConfig(layout, max_tokens=max_tokens, objective=Objective(loss), optimizer=optimizer)
    )
    peer = DeepSpeedPolicy(model, len(lengths), 4, loss, LR)

    batch = experience_of(lengths, engine.hf_config.vocab_size)

    def old_log_probs() -> None:
        rollouts = rollouts_of_batch(batch.sequences, batch.action_mask, batch.attention_mask)
        batch.action_log_probs = padded_log_probs(engine.log_probs(rollouts), batch.action_mask)

    ways = {
        "old log-probs": old_log_probs,
        "megatron": lambda: engine.train_step(rollouts_of_experience(batch, loss)),
        "deepspeed": lambda: peer.train_step(batch),
    }
    in_turn(ways, 1)
    times = in_turn(ways, rounds)
    tokens = int(batch.attention_mask.sum())
    row: dict[str, Any] = {"batch": name, "sequences": len(lengths), "tokens": tokens}
    for kind in ("cpu", "wall"):
        row |= {f"{way} tokens/{kind} s": tokens / times[way][kind] for way in ("megatron", "deepspeed")}
    row["ratio"] = times["deepspeed"][clock()] / times["megatron"][clock()]
    row["old log-probs / step"] = times["old log-probs"][clock()] / times["megatron"][clock()]
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2-135m-instruct"), help="made if absent")
    parser.add_argument("--sequences", type=int, default=64, help="a multiple of 8 up to 64")
    parser.add_argument("--max_tokens", type=int, default=2048, help="of a packed micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("train_step.json"))
    args = parser.parse_args()
    model = str(prepare_model(args.model))
    ragged = [(prompt, response) for prompt, responses in ROLLOUT for response in responses][: args.sequences]
    mean = round(sum(p + r for p, r in ragged) / len(ragged))
    batches = {"real rollout": ragged, "equal lengths": [(mean // 4, mean - mean // 4)] * len(ragged)}
    rows = [
        run_ranks(1, compare, name, lengths, model, args.max_tokens, args.rounds)[0]
        for name, lengths in batches.items()
    ]
    report(rows, args.output)


if __name__ == "__main__":
    main()
