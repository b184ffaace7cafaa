"""The Megatron policy against transformers and autograd in one process, fp32, under every layout.

Tolerances: both sides compute in fp32, whose rounding is 6e-8 relative per operation. Through a few layers and a softmax
over the vocabulary, log-probs near 10 differ by some 1e-5 at most, so 1e-4 leaves room for another order of summation only;
a wrong sum over ranks, a wrong mask or a wrong head is off by far more. Gradients are compared relative to the largest
entry of their tensor, at the same 1e-4.
"""

from functools import cache

import pytest
import torch

from tests.distributed.policy_ranks import GROUP_SIZE, OPTIMIZER, make_rollouts, policy_on_ranks
from tests.distributed.reference_policy import ReferencePolicy
from tests.tiny_models import CONFIGS, save_tiny_model

TOLERANCE = 1e-4

LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, dict(tensor_model_parallel_size=2)),
    "TP2 + SP": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "PP2": (2, dict(pipeline_model_parallel_size=2)),
    "PP3": (3, dict(pipeline_model_parallel_size=3)),
    "DP2": (2, {}),
    "TP2 x PP2": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "PP2 x DP2": (4, dict(pipeline_model_parallel_size=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@cache
def reference(folder, name: str):
    """Model folder, rollouts, and what transformers says of them."""
    path = save_tiny_model(folder, name)
    samples = make_rollouts(CONFIGS[name].vocab_size)
    policy = ReferencePolicy(path)
    with torch.no_grad():
        log_probs = [policy.log_probs(s["tokens"]) for s in samples]
    loss = policy.loss(samples, log_probs, GROUP_SIZE).item()
    gradients = policy.gradients(samples, log_probs, GROUP_SIZE)
    initial = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    parameters = policy.train(2, OPTIMIZER, samples, log_probs, GROUP_SIZE)
    expected = dict(log_probs=log_probs, loss=loss, gradients=gradients, initial=initial, parameters=parameters)
    return path, samples, expected


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry of the expected tensor."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def check(result, samples, expected) -> None:
    for log_probs, reference_log_probs, sample in zip(result["log_probs"], expected["log_probs"], samples, strict=True):
        difference = (log_probs - reference_log_probs * sample["response_mask"]).abs().max()
        assert difference <= TOLERANCE
    assert result["metrics"]["policy_loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert result["gradients"].keys() == expected["gradients"].keys()
    errors = {n: relative_error(g, expected["gradients"][n]) for n, g in result["gradients"].items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen2-untied"])
def test_log_probs_loss_and_gradients_equal_those_of_transformers(ranks, folder, name, layout):
    path, samples, expected = reference(folder, name)
    world_size, sizes = LAYOUTS[layout]
    result = ranks.run(world_size, policy_on_ranks, path, sizes, samples, expected["log_probs"])[0]
    check(result, samples, expected)
    assert 0 < result["metrics"]["clip_fraction_upper"] < 1
    for parameter, tensor in result["parameters"].items():
        moved = (expected["parameters"][parameter] - expected["initial"][parameter]).abs().max()
        assert (tensor - expected["parameters"][parameter]).abs().max() <= TOLERANCE * moved, parameter


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"llama-tied", "qwen2-untied"}))
def test_every_family_equals_transformers_under_tensor_and_pipeline_parallelism(ranks, folder, name):
    path, samples, expected = reference(folder, name)
    for layout in ("one rank", "TP2 x PP2"):
        world_size, sizes = LAYOUTS[layout]
        check(ranks.run(world_size, policy_on_ranks, path, sizes, samples, expected["log_probs"])[0], samples, expected)


def test_gradient_does_not_depend_on_the_micro_batch_budget_or_on_recompute(ranks, folder):
    path, samples, expected = reference(folder, "qwen2-untied")
    results = [
        ranks.run(
            1, policy_on_ranks, path, {}, samples, expected["log_probs"], max_tokens, 1, torch.float32, recompute
        )[0]
        for max_tokens, recompute in ((40, False), (10_000, False), (10_000, True))
    ]
    for other in results[1:]:
        for name, gradient in results[0]["gradients"].items():
            assert relative_error(gradient, other["gradients"][name]) <= 1e-5, name
