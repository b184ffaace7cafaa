"""The process groups that this rank belongs to."""

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """Tensor-parallel, pipeline-parallel, and data-parallel (with context-parallel) group of this rank."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup

    @classmethod
    def of_this_rank(cls) -> "Groups":
        """From Megatron's parallel state, after `runtime.initialize`."""
        from megatron.core import parallel_state

        return cls(
            tp=cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group()),
            pp=cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group()),
            dp_cp=cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        )

    @property
    def first_stage(self) -> int:
        """Global rank of this pipeline's first stage."""
        return dist.get_global_rank(self.pp, 0)

    @property
    def last_stage(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)
