"""bf16 on the CPU: see `bf16_parity`."""

import pytest

from tests.distributed.bf16_parity import distances


@pytest.mark.parametrize("layout", ["one rank", "TP2 + SP"])
@pytest.mark.parametrize("family", ["llama-tied", "qwen2-untied", "qwen3"])
def test_bf16_is_as_far_from_fp32_as_transformers_is(ranks, tmp_path, family, layout):
    ours, theirs = distances(ranks, tmp_path, family, layout)
    print(family, layout, ours, theirs)
    assert ours.log_probs <= 1.5 * theirs.log_probs
    assert ours.gradients <= 1.5 * theirs.gradients
