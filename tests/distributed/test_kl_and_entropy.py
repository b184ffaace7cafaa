"""KL and entropy terms beside the policy loss, and the reference model, against transformers and autograd.

The tolerance and what it is relative to: see `parity_matrix`.
"""

import os
from typing import Any

import pytest
import torch

from gapo_megatron.loss.kl import KLConfig
from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.model_engine import ModelEngine, ModelSettings
from gapo_megatron.megatron.objective import Objective
from tests.distributed.parity_matrix import LAYOUTS, TOLERANCE, compare
from tests.distributed.policy_ranks import GROUP_SIZE, OPTIMIZER, make_rollouts, policy_on_ranks, to_rollouts
from tests.distributed.reference_policy import ReferencePolicy
from tests.tiny_models import CONFIGS, save_tiny_model

FAMILY = "llama-tied"
KL_COEF, ENTROPY_COEF = 0.5, 0.1  # large, so that an error in either term is seen beside the policy's


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, Any]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), FAMILY)
    policy = ReferencePolicy(path)
    samples = make_rollouts(CONFIGS[FAMILY].vocab_size)
    with torch.no_grad():
        log_probs = [policy.log_probs(s["tokens"]) for s in samples]
    generator = torch.Generator().manual_seed(1)
    for sample, values in zip(samples, log_probs, strict=True):
        sample["base_log_probs"] = values + 0.3 * torch.randn(values.shape, generator=generator)
    arguments = (samples, log_probs, GROUP_SIZE)
    with torch.no_grad():
        policy_loss = policy.loss(*arguments).item()
        metrics = dict(policy_loss=policy_loss, entropy=policy.mean_entropy(samples))
        kl = policy.loss(*arguments, 1.0).item() - policy_loss
    return dict(
        path=path,
        samples=samples,
        old_log_probs=log_probs,
        log_probs=[lp * s["response_mask"] for lp, s in zip(log_probs, samples, strict=True)],
        metrics=metrics,
        kl=kl,
        gradients=policy.gradients(*arguments, KL_COEF, ENTROPY_COEF),
        policy_gradients=policy.gradients(*arguments),
        initial=policy.parameters(),
        parameters=policy.train(2, OPTIMIZER, *arguments, KL_COEF, ENTROPY_COEF),
    )


@pytest.mark.parametrize("layout", ["one rank", "TP2", "TP2 + SP", "PP2", "CP2", "DP2"])
def test_policy_kl_and_entropy_terms_have_the_gradient_of_one_process(ranks, expected, layout):
    world_size, sizes = LAYOUTS[layout]
    objective = Objective(kl=KLConfig("k3"), kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF)
    arguments = (expected["path"], sizes, expected["samples"], expected["old_log_probs"], dict(objective=objective))
    result = ranks.run(world_size, policy_on_ranks, *arguments)[0]
    errors = compare(result, expected, expected["initial"])
    print(layout, errors)
    assert errors.worst <= TOLERANCE
    assert result["metrics"]["kl"] == pytest.approx(expected["kl"], abs=1e-5)
    # Without the terms the gradient would be another one.
    assert compare(result, {**expected, "gradients": expected["policy_gradients"]}, expected["initial"]).gradients > 0.1


def base_and_old_log_probs(path: str, sizes: dict[str, Any], samples: list[dict[str, Any]]):
    """Of the same weights: a reference model's, and a policy's before training."""
    layout = ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(layout, timeout_minutes=1)
    rollouts = to_rollouts(samples, Objective().policy, None)
    settings = dict(params_dtype=torch.bfloat16, max_tokens=64)
    reference = ModelEngine(path, ModelSettings(layout, **settings))
    assert not hasattr(reference, "optimizer")
    return reference.log_probs(rollouts), PolicyEngine(path, EngineConfig(layout, **settings)).log_probs(rollouts)


@pytest.mark.parametrize("layout", ["TP2", "PP2 x VPP2"])
def test_a_policy_that_was_not_trained_equals_its_reference_model_exactly(ranks, expected, layout):
    world_size, sizes = LAYOUTS[layout]
    for base, old in ranks.run(world_size, base_and_old_log_probs, expected["path"], sizes, expected["samples"]):
        assert all(torch.equal(a, b) for a, b in zip(base, old, strict=True))
