"""Our loss against the paper written in plain Python.

Tolerance 1e-12, fp64: a step here sums at most a few hundred terms of size about 1, each with a few roundings of 2e-16, so
honest differences stay below 1e-13; the narrowest clip width is 7e-5, so any mistake in a width or ratio is at least a
million times larger than the tolerance.
"""

import itertools
import random

import pytest
import torch

from gapo_megatron.loss.aggregate import denominator
from gapo_megatron.loss.clip import upper_clip
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.policy_loss import PolicyLossOutput, policy_loss
from gapo_megatron.loss.ratio import sequence_log_ratio_sums
from tests.unit.reference_loss import Sequence, reference

TOLERANCE = 1e-12
WIDTHS = {"sequence": ((3e-3, 5e-3), (7e-5, 3e-4), (3e-3, 3e-3)), "token": ((0.2, 0.28), (0.2, 0.2))}
SETTINGS = list(
    itertools.product(("sequence", "token"), ("linear", "exponential", "fixed"), ("token-mean", "seq-mean-token-mean"))
)


def random_batch(rng: random.Random, scale: float) -> list[Sequence]:
    """Groups with none, all and some correct; masks with holes; empty responses. Log ratios are about `scale`."""
    batch = []
    k = rng.randint(2, 6)
    for prompt, c in enumerate((0, k, 1, rng.randint(0, k))):
        drift = rng.gauss(0, scale)
        for i in range(k):
            tokens = []
            for _ in range(rng.choice((0, 2, 5, 9))):
                old = -rng.expovariate(0.5)
                tokens.append((old + drift + rng.gauss(0, scale), old, rng.random() < 0.75))
            batch.append(Sequence(tokens, int(i < c), prompt))
    rng.shuffle(batch)
    return batch


def flatten(batch: list[Sequence]) -> dict[str, torch.Tensor]:
    """Flat fp64 token tensors and per-sequence statistics, with eq. 2's advantages computed by torch."""
    flat = [(i, *token) for i, sequence in enumerate(batch) for token in sequence.tokens]
    rewards = torch.tensor([s.reward for s in batch], dtype=torch.float64)
    same_group = torch.tensor([[a.prompt == b.prompt for b in batch] for a in batch], dtype=torch.float64)
    ids = torch.tensor([i for i, *_ in flat], dtype=torch.long)
    mask = torch.tensor([inside for *_, inside in flat], dtype=torch.bool)
    return {
        "sequence_ids": ids,
        "log_probs": torch.tensor([new for _, new, _, _ in flat], dtype=torch.float64),
        "old_log_probs": torch.tensor([old for _, _, old, _ in flat], dtype=torch.float64),
        "mask": mask,
        "advantages": (rewards - same_group @ rewards / same_group.sum(1))[ids],
        "group_correct": same_group @ rewards,
        "group_size": same_group.sum(1),
        "correct": rewards > 0.5,
        "response_lengths": torch.bincount(ids[mask], minlength=len(batch)),
    }


def run(flat: dict[str, torch.Tensor], config: PolicyLossConfig) -> tuple[PolicyLossOutput, torch.Tensor, torch.Tensor]:
    """Output, step loss and d loss / d log_probs of one whole optimizer step."""
    log_probs = flat["log_probs"].clone().requires_grad_()
    lengths = flat["response_lengths"]
    sums = sequence_log_ratio_sums(
        log_probs, flat["old_log_probs"], flat["mask"], flat["sequence_ids"], lengths.numel()
    )
    output = policy_loss(
        log_probs,
        flat["old_log_probs"],
        flat["advantages"],
        flat["mask"],
        flat["sequence_ids"],
        sums / lengths.clamp(min=1),
        upper_clip(flat["group_correct"], flat["group_size"], flat["correct"], config),
        lengths,
        config,
    )
    loss = output.loss_sum / denominator(flat["mask"], lengths, config.aggregation).clamp(min=1)
    return output, loss, torch.autograd.grad(loss, log_probs)[0]


@pytest.mark.parametrize(("level", "schedule", "aggregation"), SETTINGS)
def test_loss_and_gradient_are_the_papers_on_random_batches(level: str, schedule: str, aggregation: str) -> None:
    clipped_upper = clipped_lower = capped = 0
    for seed in range(25):
        rng = random.Random(f"{level}{schedule}{aggregation}{seed}")
        eps_lo, eps_hi_max = rng.choice(WIDTHS[level])
        # A dual clip just above 1 + eps, so that it acts at these scales.
        dual_clip = rng.choice((None, None, 1 + 1.2 * eps_hi_max))
        batch = random_batch(rng, scale=rng.choice((0.5, 2.0, 4.0)) * eps_hi_max)
        config = PolicyLossConfig(level, eps_lo, eps_hi_max, schedule, aggregation, dual_clip)
        expected = reference(batch, level, schedule, aggregation, eps_lo, eps_hi_max, dual_clip)
        flat = flatten(batch)
        output, loss, gradient = run(flat, config)

        eps_hi = upper_clip(flat["group_correct"], flat["group_size"], flat["correct"], config)
        assert eps_hi.tolist() == pytest.approx(expected.eps_hi, rel=0, abs=TOLERANCE)
        assert loss.item() == pytest.approx(expected.loss, rel=0, abs=TOLERANCE)
        flat_gradient = [g for row in expected.gradient for g in row]
        assert gradient.tolist() == pytest.approx(flat_gradient, rel=0, abs=TOLERANCE)
        assert (output.clipped_upper.item(), output.clipped_lower.item()) == (
            expected.clipped_upper,
            expected.clipped_lower,
        )
        assert output.tokens.item() == flat["mask"].sum().item()
        clipped_upper += expected.clipped_upper
        clipped_lower += expected.clipped_lower
        if dual_clip is not None:
            without = reference(batch, level, schedule, aggregation, eps_lo, eps_hi_max)
            capped += without.gradient != expected.gradient
    # The batches reach every branch of eq. 12.
    assert clipped_upper > 20
    assert clipped_lower > 20
    assert capped > 0


def test_reference_derivative_agrees_with_finite_differences() -> None:
    rng = random.Random(7)
    batch = random_batch(rng, scale=1e-3)
    gradient = reference(batch, "sequence", "linear", "token-mean", 3e-3, 5e-3).gradient
    step = 1e-6  # central differences err by step**2 and by rounding / step = 1e-10
    for i, sequence in enumerate(batch):
        for t, (new, old, inside) in enumerate(sequence.tokens):
            values = []
            for sign in (1, -1):
                sequence.tokens[t] = (new + sign * step, old, inside)
                values.append(reference(batch, "sequence", "linear", "token-mean", 3e-3, 5e-3).loss)
            sequence.tokens[t] = (new, old, inside)
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[i][t], abs=1e-8)
