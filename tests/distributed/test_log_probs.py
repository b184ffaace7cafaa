"""The fused vocabulary-parallel log-probs against full logits and autograd.

fp64 on both sides, so that 1e-10 leaves room for another order of summation only.
"""

import os

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.log_probs import vocab_parallel_log_probs
from gapo_megatron.megatron.model import padded_vocab_size

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 37, 16, 101, 0.7


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    upstream = torch.randn(2, TOKENS, dtype=torch.float64, generator=generator)
    return hidden, weight, labels, upstream


def loss(log_probs, entropy, upstream, entropy_coef: float):
    """A random combination of all outputs; without the entropy term if `entropy_coef` is 0."""
    total = (log_probs * upstream[0]).sum()
    return total + entropy_coef * (entropy * upstream[1]).sum() if entropy_coef else total


def fused(tile: tuple[int, int], entropy_coef: float):
    """Log-probs, entropies, gradients of hidden (summed over ranks) and of this rank's rows of the weight."""
    world = int(os.environ["WORLD_SIZE"])
    runtime.initialize(ParallelLayout(world, tensor_model_parallel_size=world), timeout_minutes=1)
    hidden, weight, labels, upstream = problem()
    rows = padded_vocab_size(VOCAB, world) // world
    padding = torch.full((rows * world - VOCAB, HIDDEN), 1e3, dtype=torch.float64)  # must take no part
    shard = torch.cat((weight, padding))[dist.get_rank() * rows :][:rows].clone().requires_grad_()
    hidden.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(hidden, shard, labels, VOCAB, dist.group.WORLD, TEMPERATURE, tile)
    loss(log_probs, entropy, upstream, entropy_coef).backward()
    dist.all_reduce(hidden.grad)
    return log_probs.detach(), entropy.detach(), hidden.grad, shard.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("tile", "entropy_coef"), [((8, 16), 0.0), ((1000, 1000), 0.0), ((8, 16), 0.5), ((1000, 1000), -0.5)]
)
def test_values_and_gradients_equal_those_of_full_logits(ranks, world_size, tile, entropy_coef):
    hidden, weight, labels, upstream = (t.requires_grad_() if i < 2 else t for i, t in enumerate(problem()))
    full = (hidden @ weight.t() / TEMPERATURE).log_softmax(-1)
    log_probs = full.gather(1, labels[:, None]).squeeze(1)
    entropy = -(full.exp() * full).sum(-1)
    loss(log_probs, entropy, upstream, entropy_coef).backward()

    results = ranks.run(world_size, fused, tile, entropy_coef)
    for actual_log_probs, actual_entropy, grad_hidden, _ in results:
        torch.testing.assert_close(actual_log_probs, log_probs.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(actual_entropy, entropy.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grad_hidden, hidden.grad, rtol=0, atol=1e-10)
    grad_weight = torch.cat([result[3] for result in results])
    torch.testing.assert_close(grad_weight[:VOCAB], weight.grad, rtol=0, atol=1e-10)
    assert not grad_weight[VOCAB:].any()
