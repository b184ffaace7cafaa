"""The process groups that this rank belongs to."""

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """Tensor-, pipeline-, context-parallel and data-parallel (with context-parallel) group of this rank, and the groups
    of its experts: tensor-, expert- and data-parallel."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup

    @classmethod
    def of_this_rank(cls) -> "Groups":
        """From Megatron's parallel state, after `runtime.initialize`."""
        from megatron.core import parallel_state

        return cls(
            tp=cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group()),
            pp=cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group()),
            cp=cast(dist.ProcessGroup, parallel_state.get_context_parallel_group()),
            dp_cp=cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            expert_tp=cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group()),
            ep=cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group()),
            expert_dp=cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group()),
        )

    @property
    def last_stage(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)
