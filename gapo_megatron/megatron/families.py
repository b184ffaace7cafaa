"""The model families: how a Hugging Face configuration becomes a Megatron-Core one.

A family is a row of `FAMILIES`. Every field of a Hugging Face configuration is either read here, or known to have no
effect on a decoder-only policy, or must have the one value that the conversion assumes; a field that is none of these is
an error, because a silently ignored field trains another model.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """What distinguishes one family of Llama-like decoders.

    Attributes:
        attention_bias: bias on the fused query, key and value projection: True, False, or the name of the
            configuration field that says so.
        qk_layernorm: RMSNorm on each head's queries and keys.
        required: fields that must have exactly this value (absent counts as having it).
        ignored: fields of this family that have no effect here.
    """

    attention_bias: bool | str = False
    qk_layernorm: bool = False
    required: tuple[tuple[str, Any], ...] = ()
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
        "problem_type",
        "return_dict",
        "rope_interleaved",
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
    if isinstance(family.attention_bias, str):
        known |= {family.attention_bias}
    unknown = sorted(f for f in set(fields) - known if not f.startswith("_") and not f.endswith("_token_id"))
    if unknown:
        raise ValueError(
            f"--actor.model_name_or_path: the configuration of this {hf_config.model_type} model has fields that "
            f"--actor.backend megatron does not understand: {', '.join(unknown)}"
        )
    return family


def attention_bias(hf_config: Any) -> bool:
    """Whether the query, key and value projections of `hf_config` have a bias."""
    bias = FAMILIES[hf_config.model_type].attention_bias
    return bool(getattr(hf_config, bias)) if isinstance(bias, str) else bias


def head_dim(hf_config: Any) -> int:
    """Size of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
