"""Samples that real rollouts contain and trainers trip over: values and gradients against transformers."""

import pytest
import torch

from tests.distributed.parity_matrix import LAYOUTS, TOLERANCE, compare
from tests.distributed.policy_ranks import GROUP_SIZE, OPTIMIZER, policy_on_ranks
from tests.distributed.reference_policy import ReferencePolicy
from tests.tiny_models import CONFIGS, save_tiny_model

FAMILY = "llama-tied"
BUDGET = 32


def sample(prompt: int, response: int, masked: bool = False, correct: float = 1.0, seed: int = 0) -> dict:
    """One of a group with one correct rollout of `GROUP_SIZE`."""
    generator = torch.Generator().manual_seed(seed)
    length = prompt + response
    mask = torch.zeros(length - 1, dtype=torch.bool)
    mask[prompt - 1 :] = not masked
    if response == 0:
        mask[:] = False
    return dict(
        tokens=torch.randint(0, CONFIGS[FAMILY].vocab_size, (length,), generator=generator),
        response_mask=mask,
        noise=0.002 * torch.randn(length - 1, generator=generator),
        correct=correct,
        group_correct=1,
    )


ORDINARY = [sample(5, 6, seed=1), sample(4, 9, correct=0.0, seed=2)]
BATCHES = {
    "a prompt without a response": [*ORDINARY, sample(7, 0, seed=3)],
    "a fully masked response": [*ORDINARY, sample(3, 8, masked=True, seed=4)],
    "nothing but masked responses": [sample(3, 8, masked=True, seed=5), sample(4, 4, masked=True, seed=6)],
    "a response of one token": [*ORDINARY, sample(6, 1, seed=7), sample(1, 1, seed=8)],
    "a sample far longer than the budget": [*ORDINARY, sample(10, 30 * BUDGET // 10, seed=9)],
    "fewer sequences than data-parallel ranks": [sample(5, 6, seed=10)],
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("model"), FAMILY)
    return path, ReferencePolicy(path)


@pytest.mark.parametrize("layout", ["one rank", "DP2", "CP2", "PP2 x VPP2", "TP2 + SP"])
@pytest.mark.parametrize("batch", BATCHES)
def test_values_and_gradients(ranks, policy, batch, layout):
    path, reference = policy
    samples = BATCHES[batch]
    with torch.no_grad():
        log_probs = [reference.log_probs(s["tokens"]) for s in samples]
    has_response = any(s["response_mask"].any() for s in samples)
    world_size, sizes = LAYOUTS[layout]
    result = ranks.run(
        world_size, policy_on_ranks, path, sizes, samples, log_probs, dict(max_tokens=BUDGET), 1 if has_response else 0
    )[0]
    if not has_response:
        assert all(not gradient.any() for gradient in result["gradients"].values())
        assert result["metrics"]["policy_loss"] == 0 and result["metrics"]["response_tokens"] == 0
        return
    arguments = (samples, log_probs, GROUP_SIZE)
    initial = reference.parameters()
    expected = dict(
        log_probs=[lp * s["response_mask"] for lp, s in zip(log_probs, samples, strict=True)],
        metrics=dict(
            policy_loss=float(reference.loss(*arguments)),
            entropy=reference.mean_entropy([s for s in samples if s["response_mask"].any()]),
        ),
        gradients=reference.gradients(*arguments),
        parameters=reference.train(1, OPTIMIZER, *arguments),
    )
    reference.model.load_state_dict({**reference.model.state_dict(), **initial})
    assert compare(result, expected, initial).worst <= TOLERANCE
