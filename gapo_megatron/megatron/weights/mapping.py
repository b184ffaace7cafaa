"""The table of parameters: Megatron name <-> Hugging Face names, in the order in which weights are streamed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gapo_megatron.megatron.families import FAMILIES, Experts, attention_bias, head_dim
from gapo_megatron.megatron.layout import num_experts
from gapo_megatron.megatron.weights.shards import (
    GATED,
    QKV,
    REPLICATED,
    ROW_PARALLEL,
    VOCAB_PARALLEL,
    Dimensions,
    Sharding,
)


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model.

    Attributes:
        layer: global layer index, or None outside of the layers.
        name: Megatron's name, with `{layer}` where the layer's index *within its chunk* goes, and `{expert}` for the
            expert's index *on its rank*.
        hf_names: Hugging Face tensors that it holds.
        sharding: how it is cut over tensor-parallel ranks.
        first_stage: for parameters outside of the layers: on the first pipeline stage, else on the last.
        expert: global index of the expert that it belongs to.
    """

    layer: int | None
    name: str
    hf_names: tuple[str, ...]
    sharding: Sharding
    first_stage: bool = False
    expert: int | None = None


def dimensions(hf_config: Any, tensor_parallel: int) -> Dimensions:
    """The sizes that `Sharding` needs."""
    return Dimensions(
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim(hf_config),
        vocab_size=hf_config.vocab_size,
        tensor_parallel=tensor_parallel,
    )


def parameters(hf_config: Any) -> Iterator[Parameter]:
    """Every parameter of the model once: embedding, layers in order, final norm, output layer.

    Tied embeddings have one owner, the first stage; the last stage's copy is `tied_output_layer`.
    """
    embedding = "embedding.word_embeddings.weight"
    yield Parameter(None, embedding, ("model.embed_tokens.weight",), VOCAB_PARALLEL, first_stage=True)
    for layer in range(hf_config.num_hidden_layers):
        for name, hf_names, sharding, expert in _layer(hf_config):
            hf = tuple(f"model.layers.{layer}.{n}" for n in hf_names)
            yield Parameter(layer, f"decoder.layers.{{layer}}.{name}", hf, sharding, expert=expert)
    yield Parameter(None, "decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED)
    if not hf_config.tie_word_embeddings:
        yield Parameter(None, "output_layer.weight", ("lm_head.weight",), VOCAB_PARALLEL)


def tied_output_layer() -> Parameter:
    """The last stage's copy of tied embeddings, present when the first stage is another rank."""
    return Parameter(None, "output_layer.weight", ("model.embed_tokens.weight",), VOCAB_PARALLEL)


_Row = tuple[str, tuple[str, ...], Sharding, int | None]


def _layer(hf_config: Any) -> Iterator[_Row]:
    family = FAMILIES[hf_config.model_type]
    qkv = tuple(f"self_attn.{p}_proj" for p in "qkv")
    yield "self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), REPLICATED, None
    yield "self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in qkv), QKV, None
    if attention_bias(hf_config):
        yield "self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in qkv), QKV, None
    if family.qk_layernorm:
        yield "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), REPLICATED, None
        yield "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), REPLICATED, None
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ROW_PARALLEL, None
    if family.experts is not None:
        yield from _experts(family.experts, num_experts(hf_config))
        return
    yield "mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), REPLICATED, None
    yield "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATED, None
    yield "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ROW_PARALLEL, None


def _experts(names: Experts, count: int) -> Iterator[_Row]:
    yield "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), REPLICATED, None
    yield "mlp.router.weight", (f"{names.module}.gate.weight",), REPLICATED, None
    for expert in range(count):
        ours, theirs = "mlp.experts.local_experts.{expert}", f"{names.module}.experts.{expert}"
        gate_and_up = (f"{theirs}.{names.gate}.weight", f"{theirs}.{names.up}.weight")
        yield f"{ours}.linear_fc1.weight", gate_and_up, GATED, expert
        yield f"{ours}.linear_fc2.weight", (f"{theirs}.{names.down}.weight",), ROW_PARALLEL, expert
