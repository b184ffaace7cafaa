"""How many ranks there are, and how they divide the model and the data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. Consecutive ranks form one model-parallel block, which holds one data shard.

    Attributes:
        world_size: all ranks of the actor.
        tensor_model_parallel_size: ranks that split every layer.
        pipeline_model_parallel_size: stages that split the layers.
        context_parallel_size: ranks that split every sequence.
        expert_model_parallel_size: ranks that split the experts; they are taken from the context- and data-parallel ranks.
        virtual_pipeline_model_parallel_size: chunks of layers on each pipeline stage (the interleaved schedule).
        sequence_parallel: split norms and residuals over the tensor-parallel ranks, along the sequence.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "virtual_pipeline_model"):
            size = getattr(self, f"{name}_parallel_size")
            if size < 1:
                raise ValueError(f"--megatron.{name}_parallel_size must be at least 1, not {size}")
        if self.world_size < 1 or self.world_size % self.ranks_per_data_shard:
            raise ValueError(
                f"--actor.num_nodes x --actor.num_gpus_per_node = {self.world_size} ranks cannot be divided into blocks "
                f"of {self.ranks_per_data_shard} (--megatron.tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} x --megatron.pipeline_model_parallel_size "
                f"{self.pipeline_model_parallel_size} x --megatron.context_parallel_size {self.context_parallel_size}); "
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
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"--megatron.virtual_pipeline_model_parallel_size {self.virtual_pipeline_model_parallel_size} interleaves "
                "pipeline stages; set --megatron.pipeline_model_parallel_size to at least 2, or leave the flag out"
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

    @property
    def num_chunks(self) -> int:
        """Consecutive parts that the layers are cut into: pipeline stages x chunks on each."""
        return self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size

    def megatron_rank(self, rank: int) -> int:
        """The rank in Megatron's order tp-cp-dp-pp of process `rank`, whose order is tp-cp-pp-dp.

        OpenRLHF sends one data shard to consecutive processes, so pipeline stages of a block must be neighbours; Megatron
        takes expert-parallel ranks from neighbouring data-parallel ones, which needs the pipeline to vary slowest.
        """
        inner = self.tensor_model_parallel_size * self.context_parallel_size
        block, within = divmod(rank, self.ranks_per_data_shard)
        stage, position = divmod(within, inner)
        return (stage * self.data_parallel_size + block) * inner + position

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each chunk, in the model's order (chunk i is on stage i mod PP).

        The remainder goes one each to the first chunks (30 over 4: 8, 8, 7, 7).
        """
        even, rest = divmod(num_layers, self.num_chunks)
        return tuple(even + (chunk < rest) for chunk in range(self.num_chunks))

    def check_model(self, hf_config: Any) -> None:
        """Raises ValueError, with flag and fix, when the model of this transformers configuration cannot be split so."""
        self._check_tensor_parallel(hf_config)
        layers = hf_config.num_hidden_layers
        if self.num_chunks > layers:
            virtual = self.virtual_pipeline_model_parallel_size
            flag = "" if virtual == 1 else f" x --megatron.virtual_pipeline_model_parallel_size {virtual}"
            raise ValueError(
                f"--megatron.pipeline_model_parallel_size {self.pipeline_model_parallel_size}{flag} is more than the "
                f"{layers} layers of this model; use at most {layers}"
            )
        self._check_experts(hf_config)

    def _check_tensor_parallel(self, hf_config: Any) -> None:
        tp = self.tensor_model_parallel_size
        heads = hf_config.num_attention_heads
        kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
        channels = expert_channels(hf_config)

        def misfit(n: int) -> str | None:
            if heads % n:
                return f"does not divide the {heads} attention heads"
            if kv_heads % n and n % kv_heads:  # fewer key-value heads than ranks are shared by whole groups of ranks
                return f"neither divides nor is a multiple of the {kv_heads} key-value heads"
            return f"does not divide the {channels} MLP channels" if channels % n else None

        if misfit(tp):
            fits = ", ".join(str(n) for n in range(1, heads + 1) if misfit(n) is None)
            raise ValueError(
                f"--megatron.tensor_model_parallel_size {tp} {misfit(tp)} of this model; use one of {fits}"
            )

    def _check_experts(self, hf_config: Any) -> None:
        ep, experts = self.expert_model_parallel_size, num_experts(hf_config)
        if ep > 1 and not experts:
            raise ValueError(
                f"--megatron.expert_model_parallel_size {ep} needs a mixture of experts, "
                f"which this {hf_config.model_type} model is not; leave the flag out"
            )
        if ep > 1 and experts % ep:
            raise ValueError(
                f"--megatron.expert_model_parallel_size {ep} does not divide the {experts} experts of this model; "
                f"use one of {', '.join(str(n) for n in range(1, experts + 1) if experts % n == 0)}"
            )
        if experts and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            raise ValueError(
                "a mixture of experts with --megatron.tensor_model_parallel_size above 1 needs sequence parallelism; "
                "add --megatron.sequence_parallel"
            )


def num_experts(hf_config: Any) -> int:
    """Experts of each layer; 0 for a dense model."""
    return getattr(hf_config, "num_local_experts", None) or getattr(hf_config, "num_experts", None) or 0


def expert_channels(hf_config: Any) -> int:
    """Channels of each MLP: of one expert in a mixture of experts."""
    return getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size
