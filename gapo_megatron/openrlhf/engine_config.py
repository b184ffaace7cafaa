"""OpenRLHF's arguments -> the engine's configuration."""

from typing import Any

import torch

from gapo_megatron.megatron.engine import EngineConfig
from gapo_megatron.megatron.optimizer import OptimizerSettings
from gapo_megatron.megatron.recompute import Recompute


def engine_config(args: Any, max_steps: int) -> EngineConfig:
    """The configuration for resolved arguments (`arguments.resolve`).

    Args:
        args: OpenRLHF's nested namespace.
        max_steps: optimizer steps of the whole run.

    Raises:
        ValueError: an option that the engine does not support, in one sentence.
    """
    return EngineConfig(
        layout=args.megatron_layout,
        params_dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[args.megatron.params_dtype],
        temperature=args.rollout.temperature,
        max_tokens=args.train.max_tokens_per_gpu,
        recompute=_recompute(args),
        loss=args.policy_loss_config,
        optimizer=OptimizerSettings(
            lr=args.actor.adam.lr,
            betas=tuple(args.actor.adam.betas),
            eps=args.actor.adam.eps,
            weight_decay=args.actor.adam.weight_decay,
            max_norm=args.actor.max_norm,
            schedule=args.actor.lr_scheduler,
            warmup_ratio=args.actor.lr_warmup_ratio,
            min_lr_ratio=args.actor.min_lr_ratio,
            total_steps=max_steps,
        ),
    )


def _recompute(args: Any) -> Recompute:
    """`--actor.gradient_checkpointing_enable` is OpenRLHF's name for full recompute."""
    granularity, modules = args.megatron.recompute_granularity, args.megatron.recompute_modules
    if args.actor.gradient_checkpointing_enable:
        if granularity == "selective":
            raise ValueError(
                "--actor.gradient_checkpointing_enable recomputes whole layers, --megatron.recompute_granularity selective "
                "parts of them; leave one out"
            )
        granularity = "full"
    if modules is None:
        return Recompute(granularity)
    if granularity != "selective":
        raise ValueError(
            "--megatron.recompute_modules names parts of a layer; add --megatron.recompute_granularity selective"
        )
    return Recompute(granularity, tuple(modules))
