"""What must hold of the loss whatever the batch."""

import random

import pytest
import torch

from gapo_megatron.loss.aggregate import denominator, token_weights
from gapo_megatron.loss.clip import upper_clip
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.policy_loss import policy_loss
from gapo_megatron.loss.ratio import importance_ratio, sequence_log_ratio_sums
from tests.unit.test_loss_reference import SETTINGS, flatten, random_batch, run

ADAPTIVE = ("linear", "exponential")


def widths(counts: list[int], k: int, correct: bool, config: PolicyLossConfig) -> torch.Tensor:
    c = torch.tensor(counts)
    return upper_clip(c, torch.full_like(c, k), torch.full_like(c, correct), config)


@pytest.mark.parametrize("schedule", ADAPTIVE)
@pytest.mark.parametrize(("eps_lo", "eps_hi_max"), [(3e-3, 5e-3), (7e-5, 3e-4), (0.2, 0.28)])
@pytest.mark.parametrize("k", [2, 8, 64])
def test_clip_width_falls_from_eps_hi_max_to_eps_lo_as_correct_rollouts_get_common(schedule, eps_lo, eps_hi_max, k):
    eps_hi = widths(list(range(1, k + 1)), k, True, PolicyLossConfig("sequence", eps_lo, eps_hi_max, schedule))
    # One rounding of a number near 1 is 2e-16.
    assert eps_hi[0].item() == pytest.approx(eps_hi_max, rel=0, abs=1e-15)
    assert eps_hi[-1].item() == pytest.approx(eps_lo, rel=0, abs=1e-15)
    assert bool((eps_hi[1:] < eps_hi[:-1]).all())


def test_exponential_clip_is_never_wider_than_linear_and_agrees_at_the_ends():
    counts = list(range(1, 9))
    linear, exponential = (
        widths(counts, 8, True, PolicyLossConfig("token", 0.2, 0.28, schedule)) for schedule in ADAPTIVE
    )
    assert bool((exponential[1:-1] < linear[1:-1]).all())  # a convex function lies below its chord
    torch.testing.assert_close(exponential[[0, -1]], linear[[0, -1]], rtol=0, atol=1e-15)


@pytest.mark.parametrize("schedule", ADAPTIVE)
def test_incorrect_rollouts_always_get_eps_lo(schedule):
    assert widths([0, 1, 7], 8, False, PolicyLossConfig(clip_schedule=schedule)).tolist() == [3e-3] * 3


def test_fixed_clip_ignores_the_group():
    config = PolicyLossConfig(clip_schedule="fixed")
    for correct, counts in ((True, [1, 4, 8]), (False, [0, 4, 7])):
        assert widths(counts, 8, correct, config).tolist() == [5e-3] * 3


def test_clip_widths_survive_float32_statistics():
    config = PolicyLossConfig("sequence", 7e-5, 3e-4)
    c, k, correct = torch.tensor([3.0]), torch.tensor([8.0]), torch.tensor([1.0])
    assert upper_clip(c, k, correct, config).item() == pytest.approx(7e-5 + 2.3e-4 * 5 / 7, rel=1e-14)


def test_a_group_of_one_rollout_has_no_adaptive_clip():
    with pytest.raises(ValueError, match="--rollout.n_samples_per_prompt"):
        widths([1], 1, True, PolicyLossConfig())


@pytest.mark.parametrize(("count", "correct"), [(0, True), (9, True), (9, False), (-1, False)])
def test_contradicting_group_statistics_are_refused(count, correct):
    with pytest.raises(ValueError, match="group_correct"):
        widths([count], 8, correct, PolicyLossConfig())


@pytest.mark.parametrize(("level", "schedule", "aggregation"), SETTINGS)
def test_fully_correct_and_fully_incorrect_groups_have_exactly_zero_gradient(level, schedule, aggregation):
    flat = flatten(random_batch(random.Random(1), scale=0.5))
    same = (flat["group_correct"] == 0) | (flat["group_correct"] == flat["group_size"])
    _, _, gradient = run(flat, PolicyLossConfig(level, clip_schedule=schedule, aggregation=aggregation))
    inside = same[flat["sequence_ids"]] & flat["mask"]
    assert int(inside.sum()) > 5
    assert bool((gradient[inside] == 0).all())
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("level", "schedule", "aggregation"), SETTINGS)
def test_values_outside_of_the_mask_change_nothing(level, schedule, aggregation, value):
    config = PolicyLossConfig(level, clip_schedule=schedule, aggregation=aggregation)
    flat = flatten(random_batch(random.Random(2), scale=3e-3))
    assert not bool(flat["mask"].all())
    output, loss, gradient = run(flat, config)
    for name in ("log_probs", "old_log_probs", "advantages"):
        spoiled = dict(flat, **{name: torch.where(flat["mask"], flat[name], value)})
        spoiled_output, spoiled_loss, spoiled_gradient = run(spoiled, config)
        assert spoiled_loss.item() == loss.item()
        assert torch.equal(spoiled_gradient, gradient)
        assert bool((spoiled_gradient[~flat["mask"]] == 0).all())
        assert vars(spoiled_output) == vars(output)


@pytest.mark.parametrize(("level", "schedule", "aggregation"), SETTINGS)
def test_gradient_does_not_depend_on_how_tokens_are_split_over_ranks(level, schedule, aggregation):
    """The context-parallel form: ranks add up one vector of log-ratio sums, and nothing else.

    fp64, tolerance 1e-15: the ranks' partial sums round differently, by a few units of 2e-16 on log ratios of 1e-2.
    """
    config = PolicyLossConfig(level, clip_schedule=schedule, aggregation=aggregation)
    flat = flatten(random_batch(random.Random(3), scale=3e-3))
    _, loss, gradient = run(flat, config)

    lengths = flat["response_lengths"]
    rank_of = torch.randint(0, 3, flat["mask"].shape, generator=torch.Generator().manual_seed(0))
    per_token = ("log_probs", "old_log_probs", "advantages", "mask", "sequence_ids")
    ranks = [{name: flat[name][rank_of == r] for name in per_token} for r in range(3)]
    ranks.append({name: flat[name][:0] for name in per_token})  # a rank without tokens
    total = sum(
        sequence_log_ratio_sums(r["log_probs"], r["old_log_probs"], r["mask"], r["sequence_ids"], lengths.numel())
        for r in ranks
    )
    eps_hi = upper_clip(flat["group_correct"], flat["group_size"], flat["correct"], config)
    count = denominator(flat["mask"], lengths, config.aggregation)
    split_loss, split_gradient = 0.0, torch.zeros_like(gradient)
    for i, r in enumerate(ranks):
        r["log_probs"].requires_grad_()
        log_s = total / lengths.clamp(min=1)
        part = policy_loss(**r, sequence_log_ratio=log_s, eps_hi=eps_hi, response_lengths=lengths, config=config)
        (part.loss_sum / count).backward()
        split_loss += (part.loss_sum / count).item()
        split_gradient[rank_of == i] = r["log_probs"].grad
    assert split_loss == pytest.approx(loss.item(), rel=0, abs=1e-15)
    torch.testing.assert_close(split_gradient, gradient, rtol=0, atol=1e-15)


def test_gradient_does_not_depend_on_the_order_of_tokens_in_a_pack():
    config = PolicyLossConfig()
    flat = flatten(random_batch(random.Random(4), scale=3e-3))
    order = torch.randperm(flat["mask"].numel(), generator=torch.Generator().manual_seed(0))
    shuffled = {
        name: value[order] if value.numel() == order.numel() else value
        for name, value in flat.items()
        if name in ("log_probs", "old_log_probs", "advantages", "mask", "sequence_ids")
    }
    _, loss, gradient = run(flat, config)
    _, shuffled_loss, shuffled_gradient = run({**flat, **shuffled}, config)
    assert shuffled_loss.item() == pytest.approx(loss.item(), rel=0, abs=1e-15)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=0, atol=1e-15)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_before_the_first_update_the_ratio_is_exactly_one(level):
    log_probs = torch.randn(9, dtype=torch.float32)
    ids = torch.arange(9) // 3
    log_s = sequence_log_ratio_sums(log_probs, log_probs, torch.ones(9, dtype=torch.bool), ids, 3) / 3
    assert importance_ratio(log_probs, log_probs, ids, log_s, level).tolist() == [1.0] * 9


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("eps_lo", [0.0, 3e-3])
def test_before_the_first_update_the_gradient_is_the_advantage(level, eps_lo):
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.25, 0.0])
    config = PolicyLossConfig(level, eps_lo=eps_lo)
    output = policy_loss(
        log_probs,
        log_probs.detach(),
        advantages,
        torch.ones(3),
        torch.arange(3),
        torch.zeros(3),
        torch.full((3,), eps_lo),
        torch.ones(3),
        config,
    )
    output.loss_sum.backward()
    assert log_probs.grad.tolist() == (-advantages).tolist()
    assert output.abs_log_ratio_sum.item() == output.abs_log_ratio_max.item() == output.approx_kl_sum.item() == 0


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("advantage", [0.5, 0.0, -0.5])
def test_a_diverged_ratio_gives_a_finite_gradient(level, advantage):
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    old = torch.tensor([-2000.0, -2000.0])
    output = policy_loss(
        log_probs,
        old,
        torch.full((2,), advantage),
        torch.ones(2),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([2000.0]),
        torch.tensor([5e-3]),
        torch.tensor([2]),
        PolicyLossConfig(level),
    )
    output.loss_sum.backward()
    assert bool(log_probs.grad.isfinite().all())
    assert output.clipped_upper.item() == (2 if advantage > 0 else 0)


def test_metrics_are_sums_over_response_tokens():
    flat = flatten(random_batch(random.Random(5), scale=3e-3))
    log_ratio = (flat["log_probs"] - flat["old_log_probs"])[flat["mask"]]
    ids, lengths = flat["sequence_ids"][flat["mask"]], flat["response_lengths"]
    log_s = torch.stack([log_ratio[ids == i].sum() / max(int(n), 1) for i, n in enumerate(lengths)])
    for level, expected in (("sequence", log_s[ids]), ("token", log_ratio)):
        output, _, _ = run(flat, PolicyLossConfig(level))
        # fp64; a log of an exp near 1 rounds by 2e-16 a token
        assert output.abs_log_ratio_sum.item() == pytest.approx(expected.abs().sum().item(), abs=1e-13)
        assert output.abs_log_ratio_max.item() == pytest.approx(expected.abs().max().item(), abs=1e-13)
        assert output.approx_kl_sum.item() == pytest.approx(-log_ratio.sum().item(), abs=1e-13)
        assert not any(v.requires_grad for name, v in vars(output).items() if name != "loss_sum")


def test_an_empty_batch_gives_zero_and_still_has_a_backward_pass():
    log_probs = torch.empty(0, requires_grad=True)
    none = torch.empty(0)
    output = policy_loss(log_probs, none, none, none, none.long(), none, none, none, PolicyLossConfig())
    output.loss_sum.backward()
    assert [v.item() for v in vars(output).values()] == [0] * 7
    assert log_probs.grad.numel() == 0


def test_sequence_mean_weighs_sequences_equally_and_does_not_count_empty_ones():
    mask = torch.tensor([1, 1, 0, 1], dtype=torch.bool)
    ids, lengths = torch.tensor([0, 0, 0, 2]), torch.tensor([2, 0, 1])
    assert token_weights(mask, ids, lengths, "seq-mean-token-mean").tolist() == [0.5, 0.5, 0.0, 1.0]
    assert denominator(mask, lengths, "seq-mean-token-mean").item() == 2
    assert token_weights(mask, ids, lengths, "token-mean").tolist() == [1.0, 1.0, 0.0, 1.0]
    assert denominator(mask, lengths, "token-mean").item() == 3


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"importance_level": "word"}, "--importance_level"),
        ({"clip_schedule": "cosine"}, "--clip_schedule"),
        ({"aggregation": "sum"}, "--actor.loss_agg_mode"),
        ({"eps_lo": float("nan")}, "--eps_lo"),
        ({"eps_lo": -1e-3}, "--eps_lo"),
        ({"eps_lo": 1.0, "eps_hi_max": 2.0}, "--eps_lo"),
        ({"eps_hi_max": float("inf")}, "--eps_hi_max"),
        ({"eps_lo": 5e-3, "eps_hi_max": 3e-3}, "--eps_hi_max"),
        ({"dual_clip": 1.0}, "--actor.dual_clip"),
        ({"correct_threshold": float("nan")}, "--correct_threshold"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_flag(changes, flag):
    with pytest.raises(ValueError, match=flag):
        PolicyLossConfig(**changes)
