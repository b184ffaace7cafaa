"""OpenRLHF's DeepSpeed actor on a machine without CUDA: its weights go to vLLM over gloo instead of NCCL."""

from typing import Any

import torch
import torch.distributed as dist


def trainer_class(deepspeed_trainer: type) -> type:
    """OpenRLHF's `ActorPPOTrainer` itself where there is CUDA, else one that sends weights by `sync.WeightSync`."""
    if torch.cuda.is_available():
        return deepspeed_trainer

    class CPUTrainer(deepspeed_trainer):
        sync: Any = None
        weight_version = 0

        def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
            if strategy.args.ds.zero_stage == 3:  # its parameters would have to be gathered for the transfer
                raise ValueError("--ds.zero_stage 3 is not supported without CUDA; use --ds.zero_stage 2")
            super().__init__(strategy, *args, **kwargs)

        def _init_vllm_sync_group(self, backend: str) -> None:
            """The group is made by the first transfer, on all ranks."""

        def broadcast_to_vllm(self) -> None:
            if self.sync is None:
                self.sync = _join(self)
            self.weight_version += 1
            self.sync.send(self.weight_version)
            dist.barrier()

    return CPUTrainer


def _join(trainer: Any) -> Any:
    # Imported here: every DeepSpeed actor imports this module, also where vLLM has nothing to do with it.
    from vllm.distributed.weight_transfer.base import ModuleSource

    from gapo_megatron.sync.weight_sync import WeightSync

    args = trainer.strategy.args
    return WeightSync(
        source=ModuleSource(trainer.actor.model.module),
        engines=trainer.vllm_engines,
        rank=dist.get_rank(),
        workers_per_engine=args.vllm.tensor_parallel_size,
    )
