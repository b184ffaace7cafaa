"""The policy engine: log-probs and optimizer steps of one rank, through Megatron's schedules."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.model_engine import ModelEngine, ModelSettings
from gapo_megatron.megatron.objective import METRICS, Objective, micro_batch_objective, summarize
from gapo_megatron.megatron.offload import PARTS, DeviceMemory, Part
from gapo_megatron.megatron.optimizer import OptimizerSettings, build_optimizer


@dataclass(frozen=True)
class EngineConfig(ModelSettings):
    """What a policy is built from: a model, whose masters and gradient sums are fp32, and how it is trained.

    Attributes:
        objective: what optimizer steps minimize.
        optimizer: AdamW and its schedule.
    """

    objective: Objective = field(default_factory=Objective)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


class PolicyEngine(ModelEngine):
    """One rank of the policy.

    Args:
        model_path: Hugging Face folder, or a name on the model hub.
        config: see `EngineConfig`.
    """

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        super().__init__(model_path, config)
        self.config = config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
        )
        self.ddp = [DistributedDataParallel(self.model_config, ddp_config, chunk) for chunk in self.chunks]
        self.model_config.finalize_model_grads_func = finalize_model_grads
        self.optimizer, self.scheduler = build_optimizer(self.ddp, config.optimizer, config.params_dtype)
        self.memory = DeviceMemory(self.ddp, self.optimizer)

    def offload(self, *parts: Part) -> None:
        """Give the device memory of `parts` back, of everything when none is named; using them then is a RuntimeError."""
        self.memory.offload(*parts)

    def reload(self, *parts: Part) -> None:
        """Undo `offload`; training continues exactly as without it."""
        self.memory.reload(*parts)

    def log_probs(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """See `ModelEngine`; of the weights as they are."""
        self.memory.require("parameters")
        return super().log_probs(rollouts)

    def train_step(self, rollouts: Sequence[Rollout], kl_coef: float | None = None) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        Args:
            kl_coef: of the KL term in this step; None takes the configuration's.

        Returns:
            metrics of the whole mini-batch, the same on every rank (see `objective.summarize`), and `grad_norm`, `lr`.

        Raises:
            RuntimeError: a gradient that is not finite, with the rank that saw it.
        """
        self.memory.require(*PARTS)
        gradient_sums = self.compute_gradients(rollouts, kl_coef)
        lr = self.scheduler.get_lr(self.optimizer.param_groups[0])
        updated, grad_norm, _ = cast(tuple, self.optimizer.step())
        if not updated:
            raise RuntimeError(f"rank {dist.get_rank()}: the optimizer skipped an update (gradients are not finite)")
        self.scheduler.step(1)
        return {**gradient_sums, "grad_norm": float(grad_norm or 0.0), "lr": float(lr)}

    def compute_gradients(self, rollouts: Sequence[Rollout], kl_coef: float | None = None) -> dict[str, float]:
        """Gradients of the mini-batch's loss into the model's `main_grad` buffers, reduced over all ranks."""
        self.memory.require("parameters", "gradients")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        objective = self.config.objective if kl_coef is None else replace(self.config.objective, kl_coef=kl_coef)
        step = partial(micro_batch_objective, objective=objective, context_parallel=self.groups.cp)
        outputs = self._run(self.ddp, rollouts, self._partition(rollouts), step, forward_only=False)
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=runtime.device())
        maxima = sums.clone()
        for output in outputs:
            sums += output["sums"]
            maxima = torch.maximum(maxima, output["sums"])
        return summarize(*self._reduce(sums, maxima), objective)

    def _reduce(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack((sums, maxima))
        self._broadcast_from_last_stage(both)
        sums, maxima = both
        dist.all_reduce(sums, group=self.groups.dp_cp)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.groups.dp_cp)
        return sums, maxima
