"""What one rank does in the parity tests: build the real engine, and return values and gradients by Hugging Face name."""

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gapo_megatron.loss.clip import upper_clip
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.optimizer import OptimizerSettings

GROUP_SIZE = 4
# A large eps keeps AdamW's update continuous in the gradient: with 1e-8, an entry whose gradient is rounding noise moves by
# +-lr, whatever its sign.
OPTIMIZER = OptimizerSettings(lr=1e-2, eps=1e-3, schedule="constant", weight_decay=0.01, max_norm=1.0, total_steps=10)


def make_rollouts(vocab_size: int, num_groups: int = 3, seed: int = 0, longest: int = 30) -> list[dict[str, Any]]:
    """Random groups as plain tensors: prompts, responses with holes in the mask, rewards; c runs over 1 .. GROUP_SIZE."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for group in range(num_groups):
        correct_count = group % GROUP_SIZE + 1
        for i in range(GROUP_SIZE):
            prompt, response = (int(n) for n in torch.randint(2, longest // 2, (2,), generator=generator))
            mask = torch.zeros(prompt + response - 1, dtype=torch.bool)
            mask[prompt - 1 :] = torch.rand(response, generator=generator) > 0.15
            samples.append(
                dict(
                    tokens=torch.randint(0, vocab_size, (prompt + response,), generator=generator),
                    response_mask=mask,
                    noise=0.02 * torch.randn(prompt + response - 1, generator=generator),
                    correct=float(i < correct_count),
                    group_correct=correct_count,
                )
            )
    return samples


def to_rollouts(samples: list[dict[str, Any]], loss: PolicyLossConfig, old_log_probs: list[torch.Tensor] | None):
    """`Rollout`s of GAPO: advantages of eq. 2, widths of eq. 11."""
    rollouts = [Rollout(s["tokens"], s["response_mask"]) for s in samples]
    if old_log_probs is None:
        return rollouts
    group_correct = torch.tensor([s["group_correct"] for s in samples])
    correct = torch.tensor([bool(s["correct"]) for s in samples])
    widths = upper_clip(group_correct, torch.full_like(group_correct, GROUP_SIZE), correct, loss)
    return [
        replace(
            rollout,
            old_log_probs=old + s["noise"],
            advantages=torch.full_like(old, s["correct"] - s["group_correct"] / GROUP_SIZE),
            eps_hi=float(width),
            base_log_probs=s.get("base_log_probs"),
        )
        for rollout, s, old, width in zip(rollouts, samples, old_log_probs, widths, strict=True)
    ]


def policy_on_ranks(
    model_path: str,
    sizes: dict[str, Any],
    samples: list[dict[str, Any]],
    old_log_probs: list[torch.Tensor],
    options: dict[str, Any],
    steps: int = 2,
) -> dict[str, Any] | None:
    """Log-probs, metrics and gradients of one mini-batch, then parameters after `steps` optimizer steps; on rank 0.

    `options` are fields of `EngineConfig` that differ from those of these tests.
    """
    torch.manual_seed(1)
    layout = ParallelLayout(world_size=int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(layout, timeout_minutes=1)
    defaults = dict(params_dtype=torch.float32, temperature=0.8, max_tokens=64, optimizer=OPTIMIZER)
    engine = PolicyEngine(model_path, EngineConfig(layout, **{**defaults, **options}))
    loss = engine.config.objective.policy
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = slice(rank * len(samples) // size, (rank + 1) * len(samples) // size)

    log_probs = engine.log_probs(to_rollouts(samples[mine], loss, None))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, log_probs, group=parallel_state.get_data_parallel_group())

    rollouts = to_rollouts(samples[mine], loss, old_log_probs[mine])
    metrics = engine.compute_gradients(rollouts)
    _gather_gradients(engine)
    gradients = {name: tensor.clone() for name, tensor in engine.weights.stream(lambda p: p.main_grad)}
    steps_metrics = [engine.train_step(rollouts) for _ in range(steps)]
    parameters = {name: tensor.clone() for name, tensor in engine.weights}
    if dist.get_rank() != 0:
        return None
    return dict(
        log_probs=[t for part in gathered for t in part],
        metrics=metrics,
        gradients=gradients,
        steps=steps_metrics,
        parameters=parameters,
    )


def _gather_gradients(engine: PolicyEngine) -> None:
    """The distributed optimizer leaves each data-parallel rank its own part of the reduced gradients: gather them."""
    for chunk in engine.ddp:
        for buffers, group in (
            (chunk.buffers, engine.groups.dp_cp),
            (chunk.expert_parallel_buffers, engine.groups.expert_dp),
        ):
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
