"""GSPO and PPO through our code against OpenRLHF's own `PolicyLoss`, where both mean the same."""

import importlib
import importlib.util
import os
import sys
import types

import pytest
import torch

from gapo_megatron.loss.aggregate import denominator
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.policy_loss import policy_loss
from gapo_megatron.loss.ratio import sequence_log_ratio_sums


@pytest.fixture(scope="module")
def openrlhf_loss() -> types.ModuleType:
    """`openrlhf.models.loss` itself. Its package imports flash-attn, so its folder is entered under another name."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
    (root,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    package = types.ModuleType("openrlhf_models_folder")
    package.__path__ = [os.path.join(root, "models")]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.loss")


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize(
    ("name", "level", "eps", "aggregation"),
    [
        ("ppo", "token", (0.2, 0.28), "token-mean"),
        ("ppo", "token", (0.2, 0.28), "seq-mean-token-mean"),
        ("gspo", "sequence", (3e-3, 5e-3), "seq-mean-token-mean"),  # the only aggregation of OpenRLHF's GSPO
    ],
)
def test_ppo_and_gspo_are_openrlhfs(openrlhf_loss, name, level, eps, aggregation, dual_clip):
    """fp64. Token means agree to rounding (1e-13); OpenRLHF adds 1e-8 to the length in a sequence mean (1e-7)."""
    generator = torch.Generator().manual_seed(0)
    sequences, length = 16, 12
    mask = torch.rand(sequences, length, generator=generator) < 0.7
    mask[3] = False  # an empty response
    old = -torch.rand(sequences, length, generator=generator, dtype=torch.float64)
    drift = torch.randn(sequences, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(sequences, length, generator=generator, dtype=torch.float64)
    new = old + 2 * eps[1] * (drift + 0.3 * noise)
    advantages = torch.randn(sequences, 1, generator=generator, dtype=torch.float64).expand(sequences, length)

    theirs_input = new.clone().requires_grad_()
    theirs = openrlhf_loss.PolicyLoss(*eps, dual_clip, aggregation == "token-mean", name)
    their_loss, their_clip, their_kl, _, _ = theirs(theirs_input, old, advantages, action_mask=mask)
    their_loss.backward()

    ours_input = new.clone().requires_grad_()
    flat = [x.reshape(-1) for x in (ours_input, old, advantages, mask)]
    ids = torch.arange(sequences).repeat_interleave(length)
    lengths = mask.sum(1)
    config = PolicyLossConfig(level, *eps, "fixed", aggregation, dual_clip)
    log_s = sequence_log_ratio_sums(flat[0], flat[1], flat[3], ids, sequences) / lengths.clamp(min=1)
    output = policy_loss(*flat, ids, log_s, torch.full((sequences,), eps[1], dtype=torch.float64), lengths, config)
    loss = output.loss_sum / denominator(flat[3], lengths, aggregation)
    loss.backward()

    tolerance = 1e-13 if aggregation == "token-mean" else 1e-7
    assert loss.item() == pytest.approx(their_loss.item(), rel=tolerance, abs=tolerance)
    torch.testing.assert_close(ours_input.grad, theirs_input.grad, rtol=tolerance, atol=tolerance)
    clipped = (output.clipped_upper + output.clipped_lower).item()
    assert 0 < clipped < int(mask.sum())
    # float32 on their side
    assert clipped / output.tokens.item() == pytest.approx(their_clip.item(), abs=1e-6)
    assert output.approx_kl_sum.item() / output.tokens.item() == pytest.approx(their_kl.item(), abs=1e-12)
