"""The Megatron policy against transformers and autograd in one process, fp32, under every layout: see `parity_matrix`."""

import pytest
import torch

from gapo_megatron.megatron.recompute import Recompute
from tests.distributed.parity_matrix import LAYOUTS, TOLERANCE, compare, exists, is_mixture, reference, run
from tests.tiny_models import CONFIGS

# One family of each kind is tested under every layout, the others under one that splits what distinguishes them.
EVERYWHERE = ("llama-tied", "qwen2-untied", "qwen3-moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("family", "layout"), [(f, name) for f in EVERYWHERE for name in LAYOUTS if exists(f, name)])
def test_a_layout_equals_transformers(ranks, folder, family, layout):
    expected = reference(folder, family)[2]["expected"]
    result = run(ranks, folder, family, layout)
    assert compare(result, expected, expected["initial"]).worst <= TOLERANCE
    assert 0 < result["metrics"]["clip_fraction_upper"] < 1


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - set(EVERYWHERE)))
def test_every_family_equals_transformers(ranks, folder, family):
    expected = reference(folder, family)[2]["expected"]
    for layout in ("one rank", "EP2 x TP2 + SP" if is_mixture(family) else "TP2 x PP2"):
        result = run(ranks, folder, family, layout)
        assert compare(result, expected, expected["initial"]).worst <= TOLERANCE, layout


def relative_error(actual, expected) -> float:
    """Largest difference, relative to the largest entry of the expected tensor."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def test_gradient_does_not_depend_on_how_the_batch_was_cut(ranks, folder):
    """Micro-batch budgets and every kind of rank; the same bound of fp32 rounding for all."""
    gradients = {
        "one pack": run(ranks, folder, "qwen2-untied", "one rank", max_tokens=10_000)["gradients"],
        "a budget of 40": run(ranks, folder, "qwen2-untied", "one rank", max_tokens=40)["gradients"],
        **{name: run(ranks, folder, "qwen2-untied", name)["gradients"] for name in ("DP2", "CP2", "TP2", "PP2")},
    }
    errors = {
        (cut, name): relative_error(gradient, gradients["one pack"][name])
        for cut, tensors in gradients.items()
        for name, gradient in tensors.items()
    }
    print(f"largest relative difference: {max(errors.values()):.1e}")
    assert max(errors.values()) <= 1e-5


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [("qwen3", "TP2 + SP", torch.float32), ("qwen3", "TP2 + SP", torch.bfloat16), ("qwen3-moe", "EP2", torch.bfloat16)],
)
def test_recompute_does_not_change_the_gradient(ranks, folder, family, layout, dtype):
    """The same operations on the same inputs, once more: no bit differs on the CPU.

    One sum excepted: the MLP's norm reads its input twice in fp32, and these two terms and the residual's are then added in
    another order (in bf16 it reads its input once, and the order is the same).
    """

    def gradients(recompute: Recompute):
        return run(ranks, folder, family, layout, params_dtype=dtype, recompute=recompute)["gradients"]

    without = gradients(Recompute())
    for recompute in (Recompute("full"), Recompute("selective"), Recompute("selective", ("core_attn", "mlp"))):
        tolerance = 1e-6 if "mlp" in recompute.modules and dtype == torch.float32 else 0
        for name, gradient in gradients(recompute).items():
            assert relative_error(gradient, without[name]) <= tolerance, (recompute, name)
