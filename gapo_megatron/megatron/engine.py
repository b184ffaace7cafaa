"""The policy engine: log-probs and optimizer steps of one rank, through Megatron's schedules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from transformers import AutoConfig

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import MicroBatch, Rollout, pack, partition
from gapo_megatron.megatron.groups import Groups
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.objective import METRICS, micro_batch_objective, summarize
from gapo_megatron.megatron.offload import PARTS, DeviceMemory, Part
from gapo_megatron.megatron.optimizer import OptimizerSettings, build_optimizer
from gapo_megatron.megatron.pipeline import run_schedule
from gapo_megatron.megatron.recompute import Recompute
from gapo_megatron.megatron.transformer_config import transformer_config
from gapo_megatron.megatron.weights.export import WeightExport
from gapo_megatron.megatron.weights.hf_folder import HFReader
from gapo_megatron.megatron.weights.load import load_hf_weights


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from.

    Attributes:
        layout: how the ranks are used.
        params_dtype: of weights and activations; masters and gradient sums are fp32.
        temperature: of the rollouts.
        max_tokens: token budget of one micro-batch.
        recompute: which activations the backward pass computes again.
        loss: the policy loss.
        optimizer: AdamW and its schedule.
    """

    layout: ParallelLayout
    params_dtype: torch.dtype = torch.bfloat16
    temperature: float = 1.0
    max_tokens: int = 16384
    recompute: Recompute = field(default_factory=Recompute)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


class PolicyEngine:
    """One rank of the policy. `runtime.initialize` must have been called with `config.layout`.

    Every method is a collective: all ranks call it in the same order, and the ranks of one model-parallel block (TP, CP,
    PP) with the same rollouts.

    Args:
        model_path: Hugging Face folder, or a name on the model hub.
        config: see `EngineConfig`.
    """

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        self.config = config
        reader = HFReader(model_path)
        self.hf_config: Any = AutoConfig.from_pretrained(reader.path)
        self.model_config = transformer_config(self.hf_config, config.layout, config.params_dtype, config.recompute)
        virtual = config.layout.virtual_pipeline_model_parallel_size
        self.chunks = [
            PolicyModel(self.model_config, self.hf_config, config.temperature, chunk).to(runtime.device())
            for chunk in (range(virtual) if virtual > 1 else [None])
        ]
        load_hf_weights(self.chunks, self.hf_config, reader)
        self.groups = Groups.of_this_rank()
        self.weights = WeightExport(self.chunks, self.hf_config, reader.shapes(), self.groups)

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

    @torch.no_grad()
    def log_probs(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """log pi(token t + 1 | tokens up to t), on every rank of the block.

        Returns:
            per rollout [length - 1] fp32 on the CPU, zero outside of the response.
        """
        self.memory.require("parameters")
        parts = self._partition(rollouts)
        gather = partial(_all_log_probs, context_parallel=self.groups.cp)
        outputs = self._run(rollouts, parts, gather, forward_only=True)
        total = sum(r.response_length for r in rollouts)
        flat = torch.cat(outputs) if outputs else torch.empty(total, device=runtime.device())
        self._broadcast_from_last_stage(flat)
        values = iter(flat.cpu().split([rollouts[i].response_length for part in parts for i in part]))
        result: list[torch.Tensor] = [torch.empty(0)] * len(rollouts)
        for i in (i for part in parts for i in part):
            result[i] = torch.zeros(rollouts[i].length - 1).masked_scatter_(rollouts[i].response_mask, next(values))
        return result

    def train_step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        Returns:
            metrics of the whole mini-batch, the same on every rank (see `objective.summarize`), and `grad_norm`, `lr`.

        Raises:
            RuntimeError: a gradient that is not finite, with the rank that saw it.
        """
        self.memory.require(*PARTS)
        gradient_sums = self.compute_gradients(rollouts)
        lr = self.scheduler.get_lr(self.optimizer.param_groups[0])
        updated, grad_norm, _ = cast(tuple, self.optimizer.step())
        if not updated:
            raise RuntimeError(f"rank {dist.get_rank()}: the optimizer skipped an update (gradients are not finite)")
        self.scheduler.step(1)
        return {**gradient_sums, "grad_norm": float(grad_norm or 0.0), "lr": float(lr)}

    def compute_gradients(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Gradients of the mini-batch's loss into the model's `main_grad` buffers, reduced over all ranks."""
        self.memory.require("parameters", "gradients")
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        objective = partial(micro_batch_objective, config=self.config.loss, context_parallel=self.groups.cp)
        outputs = self._run(rollouts, self._partition(rollouts), objective, forward_only=False)
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=runtime.device())
        maxima = sums.clone()
        for output in outputs:
            sums += output["sums"]
            maxima = torch.maximum(maxima, output["sums"])
        return summarize(*self._reduce(sums, maxima))

    def _reduce(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack((sums, maxima))
        self._broadcast_from_last_stage(both)
        sums, maxima = both
        dist.all_reduce(sums, group=self.groups.dp_cp)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.groups.dp_cp)
        return sums, maxima

    def _broadcast_from_last_stage(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self.groups.last_stage, group=self.groups.pp)

    def _partition(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Micro-batches as lists of indices; every data-parallel rank has the same number of them."""
        layout = self.config.layout
        lengths = [r.length for r in rollouts]
        budget = self.config.max_tokens * layout.context_parallel_size
        parts = partition(lengths, budget)
        count = torch.tensor(len(parts), device=runtime.device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.groups.dp_cp)
        # The interleaved schedule sends micro-batches through in groups of the pipeline's size.
        group = layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else 1
        num_parts = -(-int(count) // group) * group
        return parts if num_parts == len(parts) else partition(lengths, budget, num_parts)

    def _run(self, rollouts, parts, objective, forward_only: bool) -> list[Any]:
        """Send all micro-batches through one schedule; returns what `objective` kept, on the last stage."""
        micro_batches = [self._pack([rollouts[i] for i in part]) for part in parts]
        return run_schedule(
            self.model_config,
            forward_step_func=partial(_forward_step, objective=objective),
            data_iterator=[iter(micro_batches) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(parts),
            seq_length=self.config.max_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _pack(self, rollouts: Sequence[Rollout]) -> MicroBatch:
        tensor_parallel = self.groups.tp.size() if self.model_config.sequence_parallel else 1
        return pack(rollouts, runtime.device(), self.groups.cp.size(), self.groups.cp.rank(), tensor_parallel)


def _forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module, objective):
    batch = next(batches)
    return model(batch), partial(objective, batch)


def _all_log_probs(
    batch: MicroBatch, output: torch.Tensor, non_loss_data: bool, context_parallel: dist.ProcessGroup
) -> torch.Tensor:
    """Log-probs of all response tokens of the pack, [sum of response lengths], on each of the ranks that share it."""
    if context_parallel.size() == 1:
        return output[0]
    whole = output.new_zeros(int(batch.response_lengths.sum())).index_copy_(0, batch.response_index, output[0])
    dist.all_reduce(whole, group=context_parallel)
    return whole
