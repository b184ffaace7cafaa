"""Hugging Face folder -> this rank's shards, one parameter at a time."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gapo_megatron.megatron.model import PolicyModel
from gapo_megatron.megatron.weights.hf_folder import HFReader
from gapo_megatron.megatron.weights.mapping import Parameter, dimensions, parameters, tied_output_layer


def local_name(model: PolicyModel, parameter: Parameter) -> str | None:
    """The name of `parameter` in this stage's module, or None when another stage holds it."""
    if parameter.layer is None:
        held = model.pre_process if parameter.first_stage else model.post_process
        return parameter.name if held else None
    index = parameter.layer - get_transformer_layer_offset(model.config)
    return parameter.name.format(index) if 0 <= index < len(model.decoder.layers) else None


@torch.no_grad()
def load_hf_weights(model: PolicyModel, hf_config: Any, reader: HFReader) -> None:
    """Fill `model` from `reader`. Reads only what this rank needs; holds one parameter's full tensors at a time.

    Raises:
        ValueError: a tensor of the folder that the table does not know, a missing tensor, or a shape that differs.
    """
    table = list(parameters(hf_config))
    _refuse_unknown(reader, table, tied=hf_config.tie_word_embeddings)
    if hf_config.tie_word_embeddings and not model.pre_process:
        table.append(tied_output_layer())
    dims = dimensions(hf_config, model.config.tensor_model_parallel_size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    missing = dict(model.named_parameters())
    for parameter in table:
        name = local_name(model, parameter)
        if name is None:
            continue
        target = missing.pop(name)
        shard = parameter.sharding.split([reader.tensor(n) for n in parameter.hf_names], rank, dims)
        if shard.shape != target.shape:
            raise ValueError(
                f"--actor.model_name_or_path: {', '.join(parameter.hf_names)} give {name} the shape "
                f"{tuple(shard.shape)}, but its configuration says {tuple(target.shape)}"
            )
        target.copy_(shard)
        _mark_sharded(target, parameter)
    assert not missing, f"the weight table does not fill {sorted(missing)}"


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
