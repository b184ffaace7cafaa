"""The model families: how a Hugging Face configuration becomes a Megatron-Core one.

A family is a row of `FAMILIES`. Every field of a Hugging Face configuration is either read here, or known to have no
effect on a decoder-only policy, or must have the one value that the conversion assumes; a field that is none of these is
an error, because a silently ignored field trains another model.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """What distinguishes the mixture of experts of one family.

    Attributes:
        module: Hugging Face name of the layer's mixture.
        gate, up, down: Hugging Face names of one expert's projections.
        normalize_topk: the chosen experts' probabilities are scaled to a sum of 1: True, or the name of the configuration
            field that says so.
    """

    module: str
    gate: str
    up: str
    down: str
    normalize_topk: bool | str


@dataclass(frozen=True)
class Family:
    """What distinguishes one family of Llama-like decoders.

    Attributes:
        attention_bias: bias on the fused query, key and value projection: True, False, or the name of the
            configuration field that says so.
        qk_layernorm: RMSNorm on each head's queries and keys.
        required: fields that must have exactly this value (absent counts as having it).
        experts: of families with a mixture of experts in every layer.
        ignored: fields of this family that have no effect here.
    """

    attention_bias: bool | str = False
    qk_layernorm: bool = False
    required: tuple[tuple[str, Any], ...] = ()
    experts: Experts | None = None
    ignored: frozenset[str] = frozenset()


FAMILIES: dict[str, Family] = {
    "llama": Family(required=(("attention_bias", False), ("mlp_bias", False)), ignored=frozenset({"pretraining_tp"})),
    "qwen2": Family(
        attention_bias=True,
        required=(("use_sliding_window", False),),
        ignored=frozenset({"sliding_window", "max_window_layers", "layer_types", "use_mrope"}),
    ),
    "qwen3": Family(
        attention_bias="attention_bias",
        qk_layernorm=True,
        required=(("use_sliding_window", False),),
        ignored=frozenset({"sliding_window", "max_window_layers", "layer_types"}),
    ),
    "mistral": Family(required=(("sliding_window", None),)),
    "mixtral": Family(
        experts=Experts("block_sparse_moe", gate="w1", up="w3", down="w2", normalize_topk=True),
        required=(("sliding_window", None), ("router_jitter_noise", 0.0)),
    ),
    "qwen3_moe": Family(
        attention_bias="attention_bias",
        qk_layernorm=True,
        experts=Experts("mlp", gate="gate_proj", up="up_proj", down="down_proj", normalize_topk="norm_topk_prob"),
        required=(("use_sliding_window", False), ("decoder_sparse_step", 1), ("mlp_only_layers", [])),
        ignored=frozenset({"sliding_window", "max_window_layers"}),
    ),
}

READ = frozenset(
    {
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "tie_word_embeddings",
        "max_position_embeddings",
        "rope_parameters",
    }
)

READ_OF_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"})

# Of generation, of bookkeeping, or of initialization: no effect on a loaded policy's log-probs. Nor have private fields and
# token ids.
WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "rope_interleaved",
        "router_aux_loss_coef",  # of a loss term that is added only where a trainer asks for it
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
    }
)


def family_of(hf_config: Any) -> Family:
    """The row of `hf_config` (a transformers configuration).

    Raises:
        ValueError: a family that is not in the table, or a field that the conversion does not understand.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(
            f"--actor.model_name_or_path: the model family {hf_config.model_type!r} is not supported by "
            f"--actor.backend megatron; use one of {', '.join(sorted(FAMILIES))}, or --actor.backend deepspeed"
        )
    fields = hf_config.to_dict()
    for name, value in (("hidden_act", "silu"), *family.required):
        if fields.get(name, value) != value:
            raise ValueError(
                f"--actor.model_name_or_path: {hf_config.model_type} with {name}={fields[name]!r} is not supported by "
                f"--actor.backend megatron (only {name}={value!r})"
            )
    known = READ | WITHOUT_EFFECT | family.ignored | {"hidden_act"} | {name for name, _ in family.required}
    if family.experts is not None:
        known |= READ_OF_EXPERTS
    known |= {
        v for v in (family.attention_bias, family.experts and family.experts.normalize_topk) if isinstance(v, str)
    }
    unknown = sorted(f for f in set(fields) - known if not f.startswith("_") and not f.endswith("_token_id"))
    if unknown:
        raise ValueError(
            f"--actor.model_name_or_path: the configuration of this {hf_config.model_type} model has fields that "
            f"--actor.backend megatron does not understand: {', '.join(unknown)}"
        )
    return family


def attention_bias(hf_config: Any) -> bool:
    """Whether the query, key and value projections of `hf_config` have a bias."""
    return _flag(hf_config, FAMILIES[hf_config.model_type].attention_bias)


def normalize_topk(hf_config: Any) -> bool:
    """Whether the probabilities of a token's experts are scaled to a sum of 1."""
    experts = FAMILIES[hf_config.model_type].experts
    return experts is not None and _flag(hf_config, experts.normalize_topk)


def _flag(hf_config: Any, value: bool | str) -> bool:
    return bool(getattr(hf_config, value)) if isinstance(value, str) else value


def head_dim(hf_config: Any) -> int:
    """Size of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
