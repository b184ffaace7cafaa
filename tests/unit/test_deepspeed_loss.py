"""The loss that the DeepSpeed actor calls: OpenRLHF's own without our flags, ours by the same contract with them."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.models.loss import PolicyLoss

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.openrlhf.deepspeed_cpu import trainer_class
from gapo_megatron.openrlhf.deepspeed_loss import PaddedPolicyLoss, select
from gapo_megatron.openrlhf.experience import loss_arguments

BATCH, LENGTH, GROUP = 8, 12, 4


def batch(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(BATCH, LENGTH, generator=g, dtype=torch.float64)
    log_probs = (old + 0.01 * torch.randn(BATCH, LENGTH, generator=g, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(BATCH, LENGTH, generator=g) > 0.3
    mask[0] = False
    correct = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    group_correct = correct.view(-1, GROUP).sum(1).repeat_interleave(GROUP)
    advantages = (correct - group_correct / GROUP)[:, None].expand(BATCH, LENGTH).double()
    statistics = dict(correct=correct, group_correct=group_correct, group_size=torch.full((BATCH,), float(GROUP)))
    return log_probs, old, advantages, mask, statistics


def test_without_our_flags_openrlhfs_loss_is_the_very_same_object_and_is_called_the_same_way():
    theirs = PolicyLoss()
    args = SimpleNamespace(policy_loss_config=None)
    assert select(args, theirs) is theirs
    assert select(SimpleNamespace(), theirs) is theirs
    assert loss_arguments(args, SimpleNamespace(info={})) == {}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_step_does_not_depend_on_how_it_is_cut_into_micro_batches(parts):
    loss = PaddedPolicyLoss(PolicyLossConfig())
    log_probs, old, advantages, mask, statistics = batch()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(BATCH).chunk(parts):
        cut = {k: v[rows] for k, v in statistics.items()}
        value, *_ = loss(
            log_probs[rows], old[rows], advantages[rows], mask[rows], batch_num_tokens=float(mask.sum()), **cut
        )
        total = total + value
    total.backward()
    gradient = log_probs.grad.clone()
    whole_log_probs = batch()[0]
    value, *_ = loss(whole_log_probs, old, advantages, mask, **statistics)
    value.backward()
    torch.testing.assert_close(total, value, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient, whole_log_probs.grad, rtol=0, atol=1e-15)


def test_data_parallel_scale_is_openrlhfs():
    log_probs, old, advantages, mask, statistics = batch()
    config = PolicyLossConfig("token", eps_lo=0.2, eps_hi_max=0.28, clip_schedule="fixed")
    scale = dict(dp_size=4, batch_num_tokens=100.0, global_batch_size=16.0)
    ours, clip, kl, *_ = PaddedPolicyLoss(config)(log_probs, old, advantages, mask, **scale, **statistics)
    theirs, their_clip, their_kl, *_ = PolicyLoss(0.2, 0.28)(log_probs, old, advantages, mask, **scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    assert float(clip) == pytest.approx(float(their_clip), abs=1e-7)
    assert float(kl) == pytest.approx(float(their_kl), abs=1e-12)


def test_gapo_does_not_inherit_the_sequence_mean_that_openrlhf_forces_on_gspo():
    log_probs, old, advantages, mask, statistics = batch()
    gapo = PaddedPolicyLoss(PolicyLossConfig(eps_lo=3e-3, eps_hi_max=3e-3))
    ours, *_ = gapo(log_probs, old, advantages, mask, **statistics)
    gspo, *_ = PolicyLoss(3e-3, 3e-3, policy_loss_type="gspo")(log_probs, old, advantages, mask)
    lengths = mask.sum(1)
    ratio = (((log_probs - old) * mask).sum(1) / lengths.clamp(min=1)).exp()
    a = advantages[:, 0]
    per_sequence = torch.maximum(-a * ratio, -a * ratio.clamp(1 - 3e-3, 1 + 3e-3))
    torch.testing.assert_close(ours, (per_sequence * lengths).sum() / lengths.sum(), rtol=0, atol=1e-14)
    assert abs(float(ours - gspo)) > 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the trainer is OpenRLHF's own")
def test_without_cuda_zero_stage_3_is_refused_before_the_first_rollout():
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    strategy = SimpleNamespace(args=SimpleNamespace(ds=SimpleNamespace(zero_stage=3)))
    with pytest.raises(ValueError, match="use --ds.zero_stage 2"):
        trainer_class(ActorPPOTrainer)(strategy)
