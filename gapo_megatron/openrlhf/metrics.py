"""Metrics of a run: one JSON object a line in `metrics.jsonl`, and one line a step on the terminal."""

import json
import math
import time
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"

# name on the terminal, metric, format
COLUMNS = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("clip", "ppo_clip_ratio", ".3f"),
    ("|log s|", "log_s/mean", ".1e"),
    ("length", "rollout/response_length_mean", ".0f"),
    ("generate", "timing/generation", ".1f"),
    ("log-probs", "timing/make_experience", ".1f"),
    ("train", "timing/ppo_train", ".1f"),
    ("sync", "timing/broadcast", ".1f"),
)


def log(args: Any, global_step: int, logs: dict[str, Any], kind: str) -> None:
    """Append a step's numbers to `<--ckpt.output_dir>/metrics.jsonl`, and print a line.

    Args:
        args: OpenRLHF's arguments.
        global_step: rollout batches trained on so far.
        logs: metrics; values that are not numbers are left out, and what is not finite becomes null.
        kind: "train" or "eval".
    """
    numbers = {name: _number(value) for name, value in logs.items() if _is_number(value)}
    record = {
        "kind": kind,
        "step": global_step,
        "time": round(time.time(), 3),
        "backend": getattr(args.actor, "backend", "deepspeed"),
        "policy_loss_type": args.actor.policy_loss_type,
        **numbers,
    }
    path = Path(args.ckpt.output_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(line(global_step, numbers, kind), flush=True)


def line(global_step: int, numbers: dict[str, float | None], kind: str) -> str:
    """What the terminal shows of one step; times are in seconds."""
    if kind == "train":
        parts = [
            f"{name} {numbers[metric]:{spec}}" for name, metric, spec in COLUMNS if numbers.get(metric) is not None
        ]
    else:
        parts = [f"{name} {value:.3f}" for name, value in numbers.items() if value is not None and "_pass" in name]
    return f"[{kind} {global_step}] " + "  ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
