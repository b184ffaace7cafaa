"""What the policy and the reference model have in common in OpenRLHF's Ray groups: log-probs on Megatron-Core."""

import os
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ray.launcher import BaseModelActor
from tqdm import tqdm

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.model_engine import ModelEngine
from gapo_megatron.openrlhf.rollouts import mini_batches, num_steps, padded_log_probs, rollouts_of_batch


class MegatronModelActor(BaseModelActor):
    """One rank. OpenRLHF sends the ranks of one model-parallel block the same data and keeps the first one's answer."""

    engine: ModelEngine

    def join(self, strategy: Any, layout: ParallelLayout) -> None:
        """Take a device and join the ranks of `layout`; the engine is built afterwards."""
        self.strategy, self.args = strategy, strategy.args
        # One visible GPU per Ray actor, or all of them where Ray is told not to hide any.
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        runtime.initialize(layout, self.args.megatron.distributed_timeout_minutes)
        torch.manual_seed(self.args.train.seed)

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list[Any]:
        """OpenRLHF's entry for batched calls. All micro-batches of `forward` go through one pipeline schedule."""
        data = {name: values[start_idx:end_idx] for name, values in all_data.items()}
        if method_name == "forward":
            return self.forward(**data)
        method = getattr(self, method_name)
        return [method(*values) for values in zip(*data.values(), strict=True)]

    def forward(
        self,
        sequences: list[torch.Tensor],
        action_mask: list[torch.Tensor],
        attention_mask: list[torch.Tensor],
        mm_train_inputs_list: list | None = None,
    ) -> list[torch.Tensor]:
        """Log-probs of the rollouts at their temperature: for each batch [batch, length - 1] on the CPU.

        `mm_train_inputs_list` holds nothing for text, the only input that `arguments.resolve` lets through.
        """
        batches = [rollouts_of_batch(*batch) for batch in zip(sequences, action_mask, attention_mask, strict=True)]
        rollouts = [rollout for batch in batches for rollout in batch]
        log_probs: list[torch.Tensor] = []
        for part in self.progress(self.mini_batches(rollouts), "log-probs"):
            log_probs += self.engine.log_probs(rollouts[part])
        values = iter(log_probs)
        return [
            padded_log_probs([next(values) for _ in batch], mask)
            for batch, mask in zip(batches, action_mask, strict=True)
        ]

    def mini_batches(self, rollouts: list[Rollout]) -> list[slice]:
        """This rank's share of each optimizer step; as many steps on every data-parallel rank."""
        fewest = torch.tensor(len(rollouts), device=runtime.device())
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.engine.groups.dp_cp)
        data_parallel = self.engine.settings.layout.data_parallel_size
        return mini_batches(len(rollouts), num_steps(int(fewest), self.args.train.batch_size, data_parallel))

    def progress(self, parts: list[slice], what: str):
        """`parts` with a progress bar on the first rank."""
        return tqdm(parts, desc=what, disable=dist.get_rank() != 0)
