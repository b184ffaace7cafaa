"""Hugging Face configuration -> Megatron-Core `TransformerConfig`."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.families import attention_bias, family_of, head_dim, normalize_topk
from gapo_megatron.megatron.layout import ParallelLayout, expert_channels, num_experts
from gapo_megatron.megatron.recompute import Recompute


def transformer_config(
    hf_config: Any, layout: ParallelLayout, params_dtype: torch.dtype, recompute: Recompute | None = None
) -> TransformerConfig:
    """The `TransformerConfig` of one rank of `layout`.

    `calculate_per_token_loss` fixes the loss contract of the whole package: a loss function returns the *sum* over its
    micro-batch and its share of the denominator; Megatron sums both over the step and over data-parallel ranks, and
    divides once (`finalize_model_grads`), so that gradients do not depend on how a batch was cut.

    Args:
        recompute: which activations the backward pass computes again; None keeps all.

    Raises:
        ValueError: see `family_of` and `ParallelLayout.check_model`.
    """
    family = family_of(hf_config)
    layout.check_model(hf_config)
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=attention_bias(hf_config),
        qk_layernorm=family.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else None
        ),
        pipeline_model_parallel_layout=_pipeline_layout(layout, hf_config.num_hidden_layers),
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        # The interleaved schedule over two stages needs the form of p2p that keeps the two directions apart.
        overlap_p2p_comm=layout.virtual_pipeline_model_parallel_size > 1,
        batch_p2p_comm=layout.virtual_pipeline_model_parallel_size == 1,
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",  # the default one refuses variable lengths, also for dense models
        **(_mixture_of_experts(hf_config) if family.experts is not None else {}),
        calculate_per_token_loss=True,
        # The interleaved schedule frees what it is still sending: NCCL's streams order that, gloo would send freed memory.
        deallocate_pipeline_outputs=layout.virtual_pipeline_model_parallel_size == 1 or runtime.backend() == "nccl",
        **(recompute or Recompute()).megatron_arguments(),
        # Weights always come from a Hugging Face folder, so none are drawn here.
        perform_initialization=False,
        use_cpu_initialization=runtime.device().type == "cpu",
        # Fusions need Apex or Transformer Engine kernels.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _mixture_of_experts(hf_config: Any) -> dict[str, Any]:
    return dict(
        num_moe_experts=num_experts(hf_config),
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_ffn_hidden_size=expert_channels(hf_config),
        # Softmax over all experts, or over the chosen ones: the latter is the former scaled to a sum of 1.
        moe_router_pre_softmax=not normalize_topk(hf_config),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _pipeline_layout(layout: ParallelLayout, num_layers: int) -> list[list[str]] | None:
    """Megatron's explicit table of stages, needed where the layers do not divide evenly."""
    if num_layers % layout.num_chunks == 0:
        return None
    stages = [["decoder"] * n for n in layout.layers_per_chunk(num_layers)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
