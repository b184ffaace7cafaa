"""OpenRLHF's arguments -> the engines' configurations."""

from typing import Any

import torch

from gapo_megatron.loss.kl import KLConfig
from gapo_megatron.megatron.engine import EngineConfig
from gapo_megatron.megatron.model_engine import ModelSettings
from gapo_megatron.megatron.objective import Objective
from gapo_megatron.megatron.optimizer import OptimizerSettings
from gapo_megatron.megatron.recompute import Recompute


def engine_config(args: Any, max_steps: int) -> EngineConfig:
    """The policy's configuration for resolved arguments (`arguments.resolve`).

    Args:
        args: OpenRLHF's nested namespace.
        max_steps: optimizer steps of the whole run.

    Raises:
        ValueError: an option that the engine does not support, in one sentence.
    """
    return EngineConfig(
        layout=args.megatron_layout,
        **_common(args),
        recompute=_recompute(args),
        objective=_objective(args),
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


def reference_settings(args: Any) -> ModelSettings:
    """The reference model's settings: the policy's kernels, packs and temperature, on ranks of its own."""
    return ModelSettings(layout=args.reference_layout, **_common(args))


def _common(args: Any) -> dict[str, Any]:
    return {
        "params_dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}[args.megatron.params_dtype],
        "temperature": args.rollout.temperature,
        "max_tokens": args.train.max_tokens_per_gpu,
    }


def _objective(args: Any) -> Objective:
    kl = args.algo.kl
    has_kl_term = kl.use_loss and kl.init_coef > 0  # otherwise the KL is in the reward, or there is none
    return Objective(
        policy=args.policy_loss_config,
        kl=KLConfig(kl.estimator, kl.unbiased_gradient) if has_kl_term else None,
        kl_coef=kl.init_coef,
        entropy_coef=args.actor.entropy_coef or 0.0,
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
