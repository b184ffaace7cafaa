"""What a demo run came to: a dictionary, a table and a figure."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# phase -> metric of `gapo_megatron.openrlhf.metrics`, in seconds
PHASES = {
    "generate": "timing/generation",
    "old log-probs": "timing/make_experience",
    "train": "timing/ppo_train",
    "weights to vLLM": "timing/broadcast",
}


def summarize(
    before: dict[str, Any],
    after: dict[str, Any],
    metrics: list[dict[str, Any]],
    backend: str,
    seed: int,
    seconds: float,
) -> dict[str, Any]:
    """Evaluations, mean step times by phase (the first step, which warms up, left out) and the curves."""
    steps = [m for m in metrics if m["kind"] == "train"]
    settled = steps[1:] or steps
    times = {
        phase: sum(m[key] for m in settled) / len(settled)
        for phase, key in PHASES.items()
        if all(m.get(key) is not None for m in settled)
    }
    return {
        "backend": backend,
        "seed": seed,
        "steps": len(steps),
        "seconds": round(seconds, 1),
        "before": before["pass_at_k"],
        "after": after["pass_at_k"],
        "mixed_groups": {"before": before["mixed_groups"], "after": after["mixed_groups"]},
        "response_length": {"before": before["mean_response_length"], "after": after["mean_response_length"]},
        "step_seconds": {phase: round(value, 2) for phase, value in times.items()},
        "curves": {
            "step": [m["step"] for m in steps],
            "reward": [m.get("rollout/reward_mean") for m in steps],
            "clip_fraction": [m.get("ppo_clip_ratio") for m in steps],
        },
    }


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Two tables: what was learned, and where the time went."""
    table = Table(title=f"SmolLM2-135M, GAPO, {summary['backend']} actor, {summary['steps']} steps, held-out prompts")
    for column in ("", "before", "after"):
        table.add_column(column)
    for name in summary["before"]:
        table.add_row(name, *(_interval(summary[when][name]) for when in ("before", "after")))
    for label, key, spec in (("mixed groups", "mixed_groups", ".0%"), ("response tokens", "response_length", ".1f")):
        table.add_row(label, *(format(summary[key][when], spec) for when in ("before", "after")))
    console.print(table)
    times = Table(title="seconds per step")
    for phase in summary["step_seconds"]:
        times.add_column(phase)
    times.add_row(*(f"{value:.1f}" for value in summary["step_seconds"].values()))
    console.print(times)
    console.print(f"all of it took {summary['seconds'] / 60:.1f} minutes; intervals are 95%, over prompts")


def _interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f}  ({estimate['low']:.3f} to {estimate['high']:.3f})"


def write_figure(summary: dict[str, Any], path: Path) -> None:
    """Reward and clip fraction by step, and pass@k before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = summary["curves"]
    figure, (reward, clip, passes) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    reward.plot(curves["step"], [float("nan") if v is None else v for v in curves["reward"]], marker="o")
    reward.set(title="mean reward of rollouts", xlabel="step", ylim=(0, 1))
    clip.plot(
        curves["step"], [float("nan") if v is None else v for v in curves["clip_fraction"]], marker="o", color="C1"
    )
    clip.set(title="fraction of tokens clipped", xlabel="step", ylim=(0, None))
    for when, shift in (("before", -0.18), ("after", 0.18)):
        estimates = list(summary[when].values())
        means = [e["mean"] for e in estimates]
        errors = [[e["mean"] - e["low"] for e in estimates], [e["high"] - e["mean"] for e in estimates]]
        passes.bar([i + shift for i in range(len(means))], means, width=0.36, yerr=errors, capsize=3, label=when)
    passes.set(title="held-out pass@k, 95% interval", ylim=(0, 1))
    passes.set_xticks(range(len(summary["before"])), list(summary["before"]))
    passes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
