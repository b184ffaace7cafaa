"""Published configurations become Megatron's, and nothing in a configuration is passed over in silence."""

import pytest
import torch
from transformers import AutoConfig

from gapo_megatron.megatron.families import family_of
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.model import rotary_inverse_frequencies
from gapo_megatron.megatron.transformer_config import transformer_config

# As in the config.json of the models' repositories: hidden, MLP, layers, heads, key-value heads, vocabulary, and the rest.
PUBLISHED = {
    "Llama-3.2-3B": dict(
        model_type="llama",
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=128256,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=dict(
            factor=32.0,
            high_freq_factor=4.0,
            low_freq_factor=1.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
    ),
    "Qwen2.5-Math-1.5B": dict(
        model_type="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=4096,
        max_window_layers=21,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        sliding_window=4096,
        use_sliding_window=False,
        use_mrope=False,
        tie_word_embeddings=True,
    ),
    "DeepSeek-R1-Distill-Qwen-7B": dict(
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=131072,
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        sliding_window=4096,
        use_sliding_window=False,
        use_mrope=False,
        tie_word_embeddings=False,
    ),
    "Qwen3-8B": dict(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        max_window_layers=36,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        use_sliding_window=False,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
    "Mistral-7B-v0.3": dict(
        model_type="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Mixtral-8x7B-v0.1": dict(
        model_type="mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        vocab_size=151936,
        max_position_embeddings=40960,
        max_window_layers=48,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000.0,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        use_sliding_window=False,
        attention_bias=False,
        tie_word_embeddings=False,
    ),
}


def published(name: str, **changes):
    fields = {**PUBLISHED[name], "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, **changes}
    return AutoConfig.for_model(**fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_convert(name):
    hf = published(name)
    config = transformer_config(hf, ParallelLayout(1), torch.bfloat16)
    fields = PUBLISHED[name]
    assert config.kv_channels == fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    assert config.num_query_groups == fields["num_key_value_heads"]
    assert config.add_qkv_bias == (fields["model_type"] == "qwen2")
    assert config.qk_layernorm == fields["model_type"].startswith("qwen3")
    assert config.num_moe_experts == (fields.get("num_experts") or fields.get("num_local_experts"))
    frequencies = rotary_inverse_frequencies(hf)
    assert frequencies.shape == (config.kv_channels // 2,) and frequencies[0] == 1.0
    slowest = fields["rope_theta"] ** (2 / config.kv_channels - 1)
    assert float(frequencies[-1]) == pytest.approx(slowest / (32.0 if fields.get("rope_scaling") else 1.0), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("Mistral-7B-v0.3", {"sliding_window": 4096}, "mistral with sliding_window=4096 is not supported"),
        ("Qwen3-8B", {"use_sliding_window": True}, "qwen3 with use_sliding_window=True is not supported"),
        ("Llama-3.2-3B", {"mlp_bias": True}, "llama with mlp_bias=True is not supported"),
        ("Llama-3.2-3B", {"hidden_act": "gelu"}, "llama with hidden_act='gelu' is not supported"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, r"qwen3_moe with mlp_only_layers=\[0\] is not supported"),
        ("Mixtral-8x7B-v0.1", {"router_jitter_noise": 0.1}, "mixtral with router_jitter_noise=0.1 is not supported"),
        ("Qwen3-8B", {"logit_scale": 0.5}, "fields that --actor.backend megatron does not understand: logit_scale"),
    ],
)
def test_what_the_conversion_does_not_understand_is_an_error(name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        family_of(published(name, **changes))


def test_another_family_is_refused_with_those_that_are_supported():
    with pytest.raises(
        ValueError, match="family 'gemma2' is not supported .*; use one of llama, mistral, mixtral, qwen2"
    ):
        family_of(AutoConfig.for_model("gemma2"))
