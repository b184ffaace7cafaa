"""How far bf16 takes the policy and transformers from transformers in fp32, on the same weights and tokens.

bf16 keeps 8 bits, so both sides are some percent off in gradients, each in its own way; what can be asked of ours is an
error of the same size as transformers' own.
"""

from dataclasses import dataclass

import torch

from tests.distributed.parity_matrix import LAYOUTS
from tests.distributed.policy_ranks import GROUP_SIZE, make_rollouts, policy_on_ranks
from tests.distributed.ranks import RankPool
from tests.distributed.reference_policy import ReferencePolicy
from tests.tiny_models import CONFIGS, save_tiny_model


@dataclass(frozen=True)
class Distance:
    """From fp32: root mean square over log-probs, and over the gradients' entries relative to their norm."""

    log_probs: float
    gradients: float


def distances(ranks: RankPool, folder, family: str, layout: str) -> tuple[Distance, Distance]:
    """Of our engine under `layout`, and of transformers, both in bf16."""
    path = save_tiny_model(folder, family, torch.bfloat16)
    samples = make_rollouts(CONFIGS[family].vocab_size)
    exact, rounded = ReferencePolicy(path), ReferencePolicy(path, dtype=torch.bfloat16)
    world_size, sizes = LAYOUTS[layout]

    def ours(old_log_probs: list[torch.Tensor]) -> dict:
        options = dict(params_dtype=torch.bfloat16)
        return ranks.run(world_size, policy_on_ranks, path, sizes, samples, old_log_probs, options, 0)[0]

    # Each side clips by its own old log-probs, as in training: else rounding would decide which tokens have a gradient.
    expected = _log_probs(exact, samples)
    theirs, mine = _log_probs(rounded, samples), ours(expected)["log_probs"]
    gradients = exact.gradients(samples, expected, GROUP_SIZE)

    def distance(log_probs: list[torch.Tensor], tensors: dict[str, torch.Tensor]) -> Distance:
        errors = [(a - b)[s["response_mask"]] for a, b, s in zip(log_probs, expected, samples, strict=True)]
        squares = sum(float((g.double() - gradients[n].double()).square().sum()) for n, g in tensors.items())
        norm = sum(float(g.double().square().sum()) for g in gradients.values())
        return Distance(float(torch.cat(errors).double().square().mean().sqrt()), (squares / norm) ** 0.5)

    return (
        distance(mine, ours(mine)["gradients"]),
        distance(theirs, rounded.gradients(samples, theirs, GROUP_SIZE)),
    )


@torch.no_grad()
def _log_probs(policy: ReferencePolicy, samples: list[dict]) -> list[torch.Tensor]:
    return [policy.log_probs(s["tokens"]).float() for s in samples]
