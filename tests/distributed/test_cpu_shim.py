"""What the CPU shim must leave alone."""

import torch
from transformers import AutoModelForCausalLM

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.layout import ParallelLayout
from tests.tiny_models import save_tiny_model


def rotary_frequencies(path: str) -> torch.Tensor:
    runtime.initialize(ParallelLayout(1), timeout_minutes=1)
    dirty = [torch.full((size,), torch.nan) for size in (8, 32, 1000, 100_000)]  # what uninitialized memory would show
    del dirty
    return AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq


def meta_device() -> str:
    runtime.initialize(ParallelLayout(1), timeout_minutes=1)
    with torch.device("meta"):
        return torch.nn.Linear(2, 2).weight.device.type


def test_a_transformers_model_loaded_beside_megatron_has_its_rotary_frequencies(ranks, tmp_path):
    path = save_tiny_model(tmp_path, "llama")
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq
    torch.testing.assert_close(ranks.run(1, rotary_frequencies, path)[0], expected, rtol=0, atol=0)


def test_a_model_on_the_meta_device_takes_no_memory(ranks):
    assert ranks.run(1, meta_device) == ["meta"]
