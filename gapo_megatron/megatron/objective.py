"""The objective of one micro-batch, in Megatron's loss contract, and the metrics that come with it.

The contract (`schedules.forward_step_calc_loss` with `calculate_per_token_loss`): a loss function returns the *sum* of its
micro-batch's loss, its share of the denominator as an integer tensor, and anything to keep. Megatron adds the
denominators over the step's micro-batches and over data-parallel (and context-parallel) ranks, and divides the summed
gradients by the total once. So gradients do not depend on how a mini-batch was cut.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gapo_megatron.loss.aggregate import denominator, token_weights
from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.kl import KLConfig, approximate_kl
from gapo_megatron.loss.policy_loss import policy_loss
from gapo_megatron.loss.ratio import sequence_log_ratio_sums
from gapo_megatron.megatron.batch import MicroBatch

# Sums over a mini-batch, in the order of the vector that is reduced over ranks. `max_abs_log_s` is reduced by MAX.
METRICS = (
    "loss",
    "denominator",
    "tokens",
    "clipped_upper",
    "clipped_lower",
    "abs_log_s",
    "max_abs_log_s",
    "approx_kl",
    "entropy",
    "sequences",
    "kl",
    "reference_log_ratio",
)


@dataclass(frozen=True)
class Objective:
    """policy loss + kl_coef * KL from the reference model - entropy_coef * entropy.

    The three terms weigh tokens alike and share one denominator (`policy.aggregation`).

    Attributes:
        policy: the policy loss.
        kl: the KL term, or None without one.
        kl_coef: its coefficient.
        entropy_coef: above 0 keeps the policy from becoming certain.
    """

    policy: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    kl: KLConfig | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


def micro_batch_objective(
    batch: MicroBatch, output: torch.Tensor, objective: Objective, context_parallel: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The objective of one micro-batch on the last stage.

    Args:
        batch: with old log-probs, advantages and clip widths, and log-probs of the reference model for a KL term.
        output: [2, num_response_tokens], log-probs and entropies (`PolicyModel.forward`).
        objective: its terms.
        context_parallel: ranks that hold parts of the same sequences. They add up one vector of log-ratio sums, without
            gradient; every rank takes part, whatever tokens it holds.

    Returns:
        loss sum, denominator (int), {"sums": [len(METRICS)] fp64}.
    """
    assert batch.old_log_probs is not None and batch.advantages is not None and batch.eps_hi is not None
    log_probs, entropy = output
    mask = torch.ones_like(batch.labels, dtype=torch.bool)  # response tokens only, by construction
    log_ratio_sums = sequence_log_ratio_sums(
        log_probs, batch.old_log_probs, mask, batch.sequence_ids, batch.response_lengths.numel()
    )
    if context_parallel.size() > 1:
        dist.all_reduce(log_ratio_sums, group=context_parallel)
    # Ranks that share a sequence count it once.
    counted_lengths = batch.response_lengths * (context_parallel.rank() == 0)
    result = policy_loss(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        mask,
        batch.sequence_ids,
        log_ratio_sums / batch.response_lengths.clamp(min=1),
        batch.eps_hi,
        batch.response_lengths,
        objective.policy,
    )
    aggregation = objective.policy.aggregation
    weights = token_weights(mask, batch.sequence_ids, batch.response_lengths, aggregation)
    kl = reference_log_ratio = torch.zeros_like(weights)
    if objective.kl is not None:
        assert batch.base_log_probs is not None
        kl = approximate_kl(log_probs, batch.base_log_probs, batch.old_log_probs, mask, objective.kl)
        reference_log_ratio = log_probs - batch.base_log_probs
    loss_sum = result.loss_sum + (weights * (objective.kl_coef * kl - objective.entropy_coef * entropy)).sum()
    count = denominator(mask, counted_lengths, aggregation)
    values = {
        "loss": result.loss_sum,
        "denominator": count,
        "tokens": result.tokens,
        "clipped_upper": result.clipped_upper,
        "clipped_lower": result.clipped_lower,
        "abs_log_s": result.abs_log_ratio_sum,
        "max_abs_log_s": result.abs_log_ratio_max,
        "approx_kl": result.approx_kl_sum,
        "entropy": entropy.sum(),
        "sequences": (counted_lengths > 0).sum(),
        "kl": (weights * kl).sum(),
        "reference_log_ratio": reference_log_ratio.sum(),
    }
    sums = torch.stack([values[name].detach().double() for name in METRICS])
    return loss_sum, count.int(), {"sums": sums}


def summarize(sums: torch.Tensor, maxima: torch.Tensor, objective: Objective) -> dict[str, float]:
    """Mini-batch metrics from the reduced vectors of `METRICS`: means per token (per sequence for |log s|).

    `policy_loss` and `kl`, which is there with a KL term, are terms of the objective without their coefficients.
    """
    total = dict(zip(METRICS, sums.tolist(), strict=True))
    tokens, count = max(total["tokens"], 1.0), max(total["denominator"], 1.0)
    kl = {"kl": total["kl"] / count, "logprobs_diff": total["reference_log_ratio"] / tokens}
    return {
        "policy_loss": total["loss"] / count,
        "clip_fraction_upper": total["clipped_upper"] / tokens,
        "clip_fraction_lower": total["clipped_lower"] / tokens,
        "abs_log_s_mean": total["abs_log_s"] / tokens,
        "abs_log_s_max": float(maxima[METRICS.index("max_abs_log_s")]),
        "approx_kl": total["approx_kl"] / tokens,
        "entropy": total["entropy"] / tokens,
        "response_tokens": total["tokens"],
        "sequences": total["sequences"],
        **(kl if objective.kl is not None else {}),
    }
