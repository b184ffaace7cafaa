"""How many ranks there are, and how they divide the model and the data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. Consecutive ranks form one model-parallel block (rank order tp-cp-ep-pp-dp).

    Attributes:
        world_size: all ranks of the actor.
        tensor_model_parallel_size: ranks that split every layer.
        pipeline_model_parallel_size: stages that split the layers.
        context_parallel_size: ranks that split every sequence.
        expert_model_parallel_size: ranks that split the experts; they are taken from the data-parallel ranks.
        sequence_parallel: split norms and residuals over the tensor-parallel ranks, along the sequence.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
            size = getattr(self, f"{name}_parallel_size")
            if size < 1:
                raise ValueError(f"--megatron.{name}_parallel_size must be at least 1, not {size}")
        if self.world_size < 1 or self.world_size % self.ranks_per_data_shard:
            raise ValueError(
                f"--actor.num_nodes x --actor.num_gpus_per_node = {self.world_size} ranks cannot be divided into blocks "
                f"of {self.ranks_per_data_shard} (--megatron.tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} x --megatron.pipeline_model_parallel_size "
                f"{self.pipeline_model_parallel_size} x context parallel {self.context_parallel_size}); "
                f"use a multiple of {self.ranks_per_data_shard} ranks, or smaller parallel sizes"
            )
        expert_block = (
            self.tensor_model_parallel_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        )
        if self.world_size % expert_block:
            raise ValueError(
                f"--megatron.expert_model_parallel_size {self.expert_model_parallel_size} does not fit "
                f"{self.world_size} ranks: tensor x expert x pipeline parallel = {expert_block} must divide them"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "--megatron.sequence_parallel splits work over tensor-parallel ranks; "
                "set --megatron.tensor_model_parallel_size to at least 2, or leave the flag out"
            )

    @property
    def ranks_per_data_shard(self) -> int:
        """Ranks that work on the same samples: one model-parallel block."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Blocks that work on different samples."""
        return self.world_size // self.ranks_per_data_shard

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage; the remainder goes one each to the first stages (30 over 4: 8, 8, 7, 7)."""
        even, rest = divmod(num_layers, self.pipeline_model_parallel_size)
        return tuple(even + (stage < rest) for stage in range(self.pipeline_model_parallel_size))

    def check_model(self, hf_config: Any) -> None:
        """Raises ValueError, with flag and fix, when the model of this transformers configuration cannot be split so."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        heads = hf_config.num_attention_heads
        splits = {
            "attention heads": heads,
            "key-value heads": getattr(hf_config, "num_key_value_heads", None) or heads,
            "MLP channels (intermediate_size)": hf_config.intermediate_size,
        }
        fits = [n for n in range(1, heads + 1) if all(size % n == 0 for size in splits.values())]
        for what, size in splits.items():
            if size % tp:
                raise ValueError(
                    f"--megatron.tensor_model_parallel_size {tp} does not divide the {size} {what} of this model; "
                    f"use one of {', '.join(map(str, fits))}"
                )
        layers = hf_config.num_hidden_layers
        if pp > layers:
            raise ValueError(
                f"--megatron.pipeline_model_parallel_size {pp} is more than the {layers} layers of this model; "
                f"use at most {layers}"
            )
        if self.expert_model_parallel_size > 1 and not _num_experts(hf_config):
            raise ValueError(
                f"--megatron.expert_model_parallel_size {self.expert_model_parallel_size} needs a mixture of experts, "
                f"which this {hf_config.model_type} model is not; leave the flag out"
            )


def _num_experts(hf_config: Any) -> int:
    return getattr(hf_config, "num_local_experts", None) or getattr(hf_config, "num_experts", None) or 0
