"""Tiny random models of each family, saved as ordinary Hugging Face folders."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=251,  # a prime: no tensor-parallel size divides it
    max_position_embeddings=512,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    # vLLM's CPU attention takes heads of 32 and more.
    "llama-wide-heads": LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
    "llama-one-kv-head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "mixtral": MixtralConfig(
        **SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
    # The experts' probabilities as they are, without the scaling to a sum of 1.
    "qwen3-moe-raw": Qwen3MoeConfig(
        **SHAPE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=False
    ),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=None, tie_word_embeddings=False),
}


def save_tiny_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
    """Write the model `name` of `CONFIGS` with random weights, norms and biases included; returns the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than a fresh initialization, so that every parameter's gradient is well above rounding.
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 and parameter.mean() == 1 else 0.1 * noise)
    path = folder / f"{name}-{str(dtype).removeprefix('torch.')}-{seed}"
    model.to(dtype).save_pretrained(path)
    return str(path)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ':' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def save_tiny_policy(folder: Path, name: str = "llama-wide-heads", dtype: torch.dtype = torch.bfloat16) -> str:
    """A tiny model with a byte-level tokenizer and a chat template, fit for vLLM and for OpenRLHF's command."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: SHAPE["vocab_size"] - 2]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=CHAT_TEMPLATE
    )
    path = save_tiny_model(folder, name, dtype)
    fast.save_pretrained(path)
    return path
