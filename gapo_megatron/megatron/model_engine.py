"""One rank of a model: its weights, and log-probs of rollouts. All of a reference model, and the base of the policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import MicroBatch, Rollout, pack, partition
from gapo_megatron.megatron.groups import Groups
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.pipeline import run_schedule
from gapo_megatron.megatron.recompute import Recompute
from gapo_megatron.megatron.transformer_config import transformer_config
from gapo_megatron.megatron.weights.export import WeightExport
from gapo_megatron.megatron.weights.hf_folder import HFReader
from gapo_megatron.megatron.weights.load import load_hf_weights


@dataclass(frozen=True)
class ModelSettings:
    """What a model is built from.

    Attributes:
        layout: how the ranks are used.
        params_dtype: of weights and activations.
        temperature: of the rollouts.
        max_tokens: token budget of one micro-batch.
        recompute: which activations the backward pass computes again.
    """

    layout: ParallelLayout
    params_dtype: torch.dtype = torch.bfloat16
    temperature: float = 1.0
    max_tokens: int = 16384
    recompute: Recompute = field(default_factory=Recompute)


class ModelEngine:
    """One rank of a model. `runtime.initialize` must have been called with `settings.layout`.

    Every method is a collective: all ranks call it in the same order, and the ranks of one model-parallel block (TP, CP,
    PP) with the same rollouts.

    Args:
        model_path: Hugging Face folder, or a name on the model hub.
        settings: see `ModelSettings`.
    """

    def __init__(self, model_path: str, settings: ModelSettings) -> None:
        self.settings = settings
        reader = HFReader(model_path)
        self.hf_config: Any = AutoConfig.from_pretrained(reader.path)
        self.model_config = transformer_config(
            self.hf_config, settings.layout, settings.params_dtype, settings.recompute
        )
        virtual = settings.layout.virtual_pipeline_model_parallel_size
        self.chunks = [
            PolicyModel(self.model_config, self.hf_config, settings.temperature, chunk).to(runtime.device())
            for chunk in (range(virtual) if virtual > 1 else [None])
        ]
        load_hf_weights(self.chunks, self.hf_config, reader)
        self.groups = Groups.of_this_rank()
        self.weights = WeightExport(self.chunks, self.hf_config, reader.shapes(), self.groups)

    @torch.no_grad()
    def log_probs(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """log pi(token t + 1 | tokens up to t), on every rank of the block.

        Returns:
            per rollout [length - 1] fp32 on the CPU, zero outside of the response.
        """
        parts = self._partition(rollouts)
        gather = partial(_all_log_probs, context_parallel=self.groups.cp)
        outputs = self._run(self.chunks, rollouts, parts, gather, forward_only=True)
        total = sum(r.response_length for r in rollouts)
        flat = torch.cat(outputs) if outputs else torch.empty(total, device=runtime.device())
        self._broadcast_from_last_stage(flat)
        values = iter(flat.cpu().split([rollouts[i].response_length for part in parts for i in part]))
        result: list[torch.Tensor] = [torch.empty(0)] * len(rollouts)
        for i in (i for part in parts for i in part):
            result[i] = torch.zeros(rollouts[i].length - 1).masked_scatter_(rollouts[i].response_mask, next(values))
        return result

    def _broadcast_from_last_stage(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self.groups.last_stage, group=self.groups.pp)

    def _partition(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Micro-batches as lists of indices; every data-parallel rank has the same number of them."""
        layout = self.settings.layout
        lengths = [r.length for r in rollouts]
        budget = self.settings.max_tokens * layout.context_parallel_size
        parts = partition(lengths, budget)
        count = torch.tensor(len(parts), device=runtime.device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.groups.dp_cp)
        # The interleaved schedule sends micro-batches through in groups of the pipeline's size.
        group = layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else 1
        num_parts = -(-int(count) // group) * group
        return parts if num_parts == len(parts) else partition(lengths, budget, num_parts)

    def _run(
        self, model: Sequence[torch.nn.Module], rollouts: Sequence[Rollout], parts, objective, forward_only: bool
    ) -> list[Any]:
        """Send all micro-batches through one schedule; returns what `objective` kept, on the last stage.

        Args:
            model: `self.chunks`, or what wraps them for training.
        """
        micro_batches = [self._pack([rollouts[i] for i in part]) for part in parts]
        return run_schedule(
            self.model_config,
            forward_step_func=partial(_forward_step, objective=objective),
            data_iterator=[iter(micro_batches) for _ in model],
            model=model,
            num_microbatches=len(parts),
            seq_length=self.settings.max_tokens,
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
