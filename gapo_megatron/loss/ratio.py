"""Importance ratios, per sequence or per token.

The sequence ratio (eq. 13) is used in stop-gradient form, s_{i,t} = sg(s_i) exp(log pi_t - sg(log pi_t)). It has the value
of s_i, and summed over a sequence's tokens its gradient. What ranks must share when they hold parts of one sequence is then
a vector that carries no gradient.
"""

import torch

from gapo_megatron.loss.config import ImportanceLevel

# A ratio beyond exp(20) means that training has diverged; the bound keeps 0 * inf out of the gradient.
MAX_LOG_RATIO = 20.0


def sequence_log_ratio_sums(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sequence_ids: torch.Tensor,
    num_sequences: int,
) -> torch.Tensor:
    """Sum of log pi_theta - log pi_old over each sequence's response tokens; carries no gradient.

    Under context parallelism the caller adds this vector up over ranks (one all-reduce forward, none backward), on every
    rank, also one without response tokens.

    Args:
        log_probs, old_log_probs: [num_tokens]; values outside of the mask may be anything, nan and inf included.
        mask: [num_tokens] bool (or 0 and 1), response tokens.
        sequence_ids: [num_tokens] long, in [0, num_sequences).
        num_sequences: length of the result.

    Returns:
        [num_sequences] float64; 0 for a sequence without response tokens. Divide by response lengths for log s_i.
    """
    log_ratio = log_probs.detach().double() - old_log_probs.detach().double()
    log_ratio = torch.where(mask.bool(), log_ratio, 0.0)
    return log_ratio.new_zeros(num_sequences).index_add_(0, sequence_ids, log_ratio)


def importance_ratio(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    sequence_ids: torch.Tensor,
    sequence_log_ratio: torch.Tensor,
    level: ImportanceLevel,
) -> torch.Tensor:
    """The ratio that each token's loss is built on, differentiable in `log_probs`.

    Args:
        log_probs, old_log_probs: [num_tokens], finite.
        sequence_ids: [num_tokens] long.
        sequence_log_ratio: [num_sequences] log s_i, the mean log ratio over the whole sequence's response tokens.
        level: "sequence" for s_i (eq. 13), "token" for pi_theta / pi_old.

    Returns:
        [num_tokens] float64: widths of 1e-5 around 1 leave float32 fewer than three digits.
    """
    log_probs = log_probs.double()
    if level == "token":
        return (log_probs - old_log_probs.detach().double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    s = sequence_log_ratio.detach().double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return s[sequence_ids] * (log_probs - log_probs.detach()).exp()
