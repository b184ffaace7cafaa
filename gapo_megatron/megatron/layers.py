"""Transformer layers for machines without Transformer Engine: the torch pieces that Megatron-Core leaves out.

Parameter names follow Transformer Engine's fused layers (`linear_qkv.layer_norm_weight`), so that one weight map and one
checkpoint serve both.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.attention.bias import causal_lower_right

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.packing import PackedSequences


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, replicated over TP ranks.

    The weight carries Megatron's `sequence_parallel` attribute: under sequence parallelism every TP rank sees its own
    part of the tokens, and `finalize_model_grads` sums the weight's gradients over the TP group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden` [..., hidden_size]."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """A norm's weight [size] of ones, marked for the gradient sum under sequence parallelism."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=runtime.device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return weight


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear: one module with the parameter names of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = norm_weight(config, input_size)

    def forward(self, hidden: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden` [tokens, 1, input_size] -> [tokens, 1, output_size / TP]."""
        hidden = F.rms_norm(hidden, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return super().forward(hidden, *args, **kwargs)


class PackedCausalAttention(torch.nn.Module):
    """Causal attention inside each sequence of a pack, by `scaled_dot_product_attention`.

    Takes the place of `DotProductAttention`. Under context parallelism each rank keeps its queries and gathers the keys and
    values of the whole pack, which grouped key-value heads keep small; their gradients are reduce-scattered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context_parallel_group = pg_collection.cp if config.context_parallel_size > 1 and pg_collection else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """`query` [tokens, 1, heads, head_dim], `key` and `value` [tokens, 1, kv_heads, head_dim] -> [tokens, 1, hidden]."""
        assert isinstance(packed_seq_params, PackedSequences), "sequences are always packed"
        if packed_seq_params.global_order is not None:
            key, value = self._gather(torch.stack((key, value), dim=1))[packed_seq_params.global_order].unbind(dim=1)
        # [1, heads, tokens, head_dim], the layout of scaled_dot_product_attention
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        outputs = [
            self._attend(query[:, :, span.queries], key[:, :, span.keys], value[:, :, span.keys])
            for span in packed_seq_params.spans
        ]
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(start_dim=2)

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """[tokens / CP, ...] of every rank, one after the other; the backward pass sums over ranks and scatters."""
        return gather_from_sequence_parallel_region(local.contiguous(), group=self.context_parallel_group)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        whole = query.size(2) == key.size(2)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if whole else causal_lower_right(query.size(2), key.size(2)),
            is_causal=whole,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of one decoder layer, dense or with a mixture of experts."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormColumnParallelLinear,
            core_attention=PackedCausalAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    is_dense = config.num_moe_experts is None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=cast(Any, get_bias_dropout_add),
            # A dense MLP's first linear holds the norm; the router needs normalised input too.
            pre_mlp_layernorm=IdentityOp if is_dense else cast(Any, RMSNorm),
            mlp=_dense_mlp() if is_dense else get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts),
            mlp_bda=cast(Any, get_bias_dropout_add),
        ),
    )


def _dense_mlp() -> ModuleSpec:
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """The spec of one chunk of this pipeline stage: its layers and the final norm, which Megatron builds on the last."""
    layer = layer_spec(config)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=cast(Any, RMSNorm)
    )
