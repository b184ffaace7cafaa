"""Megatron's AdamW with fp32 masters, sharded over data-parallel ranks, and its learning-rate schedule."""

from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# transformers' schedule names, as OpenRLHF's --actor.lr_scheduler takes them -> (Megatron's style, warm-up, minimum)
SCHEDULES: dict[str, tuple[str, bool, bool]] = {
    "constant": ("constant", False, False),
    "constant_with_warmup": ("constant", True, False),
    "linear": ("linear", True, False),
    "cosine": ("cosine", True, False),
    "cosine_with_min_lr": ("cosine", True, True),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule, in OpenRLHF's terms (`--actor.adam.*`, `--actor.lr_*`, `--actor.max_norm`).

    Attributes:
        lr: peak learning rate.
        betas, eps, weight_decay: of AdamW; norms and biases are not decayed.
        max_norm: gradients are clipped to this global norm; 0 turns clipping off.
        schedule: a key of `SCHEDULES`.
        warmup_ratio: share of `total_steps` with a linearly rising rate.
        min_lr_ratio: lowest rate of cosine_with_min_lr, as a share of `lr`.
        total_steps: optimizer steps of the whole run.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    schedule: str = "cosine_with_min_lr"
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1
    total_steps: int = 1000

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"--actor.lr_scheduler {self.schedule} is not supported by --actor.backend megatron; "
                f"use one of {', '.join(SCHEDULES)}"
            )
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"--actor.lr_warmup_ratio must be in [0, 1), not {self.warmup_ratio}")


def build_optimizer(
    chunks: list[DistributedDataParallel], settings: OptimizerSettings, params_dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The distributed optimizer over the `chunks` of this rank's model, and its schedule.

    Weights must be loaded before: masters copy them.
    """
    style, warmup, minimum = SCHEDULES[settings.schedule]
    min_lr = settings.lr * settings.min_lr_ratio if minimum else 0.0
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_norm,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, cast(list, chunks), use_gloo_process_groups=False)
    total = max(2, settings.total_steps)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=min_lr,
        lr_warmup_steps=min(total - 1, -int(-total * settings.warmup_ratio // 1)) if warmup else 0,
        lr_decay_steps=total,
        lr_decay_style=style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
