"""Hugging Face folder -> this rank's shards, one parameter at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.weights.hf_folder import HFReader
from gapo_megatron.megatron.weights.local import local_parameters
from gapo_megatron.megatron.weights.mapping import Parameter, dimensions, parameters, tied_output_layer


@torch.no_grad()
def load_hf_weights(chunks: Sequence[PolicyModel], hf_config: Any, reader: HFReader) -> None:
    """Fill this rank's `chunks` from `reader`. Reads only what it needs; holds one parameter's full tensors at a time.

    Raises:
        ValueError: a tensor of the folder that the table does not know, a missing tensor, or a shape that differs.
    """
    table = list(parameters(hf_config))
    _refuse_unknown(reader, table, tied=hf_config.tie_word_embeddings)
    if hf_config.tie_word_embeddings and not any(chunk.pre_process and chunk.post_process for chunk in chunks):
        table.append(tied_output_layer())
    dims = dimensions(hf_config, chunks[0].config.tensor_model_parallel_size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    missing = {parameter: name for chunk in chunks for name, parameter in chunk.named_parameters()}
    for parameter, target in local_parameters(chunks, table):
        if target is None:
            continue
        name = missing.pop(target)
        shard = parameter.sharding.split([reader.tensor(n) for n in parameter.hf_names], rank, dims)
        if shard.shape != target.shape:
            raise ValueError(
                f"--actor.model_name_or_path: {', '.join(parameter.hf_names)} give {name} the shape "
                f"{tuple(shard.shape)}, but its configuration says {tuple(target.shape)}"
            )
        target.copy_(shard)
        _mark_sharded(target, parameter)
    assert not missing, f"the weight table does not fill {sorted(missing.values())}"


def _mark_sharded(target: torch.nn.Parameter, parameter: Parameter) -> None:
    """Tell Megatron that `target` differs between tensor-parallel ranks.

    Its gradient norm counts a parameter once per group unless it carries this mark, which Megatron sets only where it
    draws initial weights.
    """
    if not parameter.sharding.replicated and not getattr(target, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(target, True, parameter.sharding.dim, 1)


def _refuse_unknown(reader: HFReader, table: list[Parameter], tied: bool) -> None:
    known = {name for parameter in table for name in parameter.hf_names}
    unknown = {name for name in reader.names() - known if not name.endswith("rotary_emb.inv_freq")}
    if tied:
        unknown -= {"lm_head.weight"}
    if unknown:
        raise ValueError(
            f"--actor.model_name_or_path: {reader.path} holds tensors that the conversion does not know: "
            f"{', '.join(sorted(unknown)[:5])}"
        )
