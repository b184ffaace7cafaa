"""Which parameter of the whole model is which torch parameter of this rank."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.weights.mapping import Parameter


def local_parameters(
    chunks: Sequence[PolicyModel], table: Iterable[Parameter]
) -> Iterator[tuple[Parameter, torch.nn.Parameter | None]]:
    """Each row of `table` with this rank's shard of it, or None when another rank holds it.

    Args:
        chunks: this pipeline stage's chunks of the model.
        table: rows of `mapping.parameters`.
    """
    named = [dict(chunk.named_parameters()) for chunk in chunks]
    for parameter in table:
        names = [_local_name(chunk, parameter) for chunk in chunks]
        held = [shards[name] for shards, name in zip(named, names, strict=True) if name is not None]
        assert len(held) <= 1, f"{parameter.name} is held twice"
        yield parameter, held[0] if held else None


def _local_name(chunk: PolicyModel, parameter: Parameter) -> str | None:
    if parameter.layer is None:
        held = chunk.pre_process if parameter.first_stage else chunk.post_process
        return parameter.name if held else None
    layer = parameter.layer - get_transformer_layer_offset(chunk.config, chunk.vp_stage)
    expert = _local_expert(chunk, parameter)
    if not 0 <= layer < len(chunk.decoder.layers) or expert is None:
        return None
    return parameter.name.format(layer=layer, expert=expert)


def _local_expert(chunk: PolicyModel, parameter: Parameter) -> int | None:
    """Index on this rank of the parameter's expert, 0 for a parameter of none, None for an expert of another rank."""
    if parameter.expert is None:
        return 0
    per_rank = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    rank, expert = divmod(parameter.expert, per_rank)
    return expert if rank == parallel_state.get_expert_model_parallel_rank() else None
