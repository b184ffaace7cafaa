"""The status that one `fit` reports to OpenRLHF: means over the rollouts and over the optimizer steps."""

from typing import Any

import torch
import torch.distributed as dist

from gapo_megatron.megatron import runtime

EPISODE_FIELDS = ("response_length", "total_length", "truncated")


class Status:
    """Gathers what is known of the rollouts while they are appended, and the metrics of each optimizer step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0
        self._steps: list[dict[str, float]] = []

    def add(self, experience: Any) -> None:
        """Take the per-sample values of a batch: OpenRLHF's `info` and its episode fields."""
        self._count += len(experience.sequences)
        values = {**experience.info, **{name: getattr(experience, name) for name in EPISODE_FIELDS}}
        for name, value in values.items():
            if value is not None:
                total = float(torch.as_tensor(value, dtype=torch.float64).sum())
                self._sums[name] = self._sums.get(name, 0.0) + total

    def add_step(self, metrics: dict[str, float]) -> None:
        """Take the metrics of one optimizer step, which are the same on every rank."""
        self._steps.append(metrics)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Means over all ranks of `group` (one all-reduce), under OpenRLHF's names; starts afresh afterwards.

        `log_s/*` describe the first optimizer step, before any update: the noise floor of the ratio.
        """
        names = sorted(self._sums)
        totals = torch.tensor([*(self._sums[n] for n in names), self._count], dtype=torch.float64)
        totals = totals.to(runtime.device())
        dist.all_reduce(totals, group=group)
        *sums, count = totals.tolist()
        status = {name: value / max(count, 1) for name, value in zip(names, sums, strict=True)}
        status |= _over_steps(self._steps)
        self.__init__()
        return status


def _over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    if not steps:
        return {}

    def mean(name: str) -> float:
        return sum(step[name] for step in steps) / len(steps)

    return {
        "policy_loss": mean("policy_loss"),
        "ppo_clip_ratio": mean("clip_fraction_upper") + mean("clip_fraction_lower"),
        "clip_fraction/upper": mean("clip_fraction_upper"),
        "clip_fraction/lower": mean("clip_fraction_lower"),
        "ppo_kl": mean("approx_kl"),
        "entropy": mean("entropy"),
        # OpenRLHF's names for a KL term of the loss; without one they are those of the KL in the reward.
        **{name: mean(name) for name in ("kl", "logprobs_diff") if name in steps[0]},
        "log_s/noise_floor_mean": steps[0]["abs_log_s_mean"],
        "log_s/noise_floor_max": steps[0]["abs_log_s_max"],
        "log_s/mean": mean("abs_log_s_mean"),
        "log_s/max": max(step["abs_log_s_max"] for step in steps),
        "actor_grad_norm": mean("grad_norm"),
        "actor_lr": steps[-1]["lr"],
        "optimizer_steps": float(len(steps)),
    }
