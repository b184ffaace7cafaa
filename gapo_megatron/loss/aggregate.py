"""How tokens are weighed, and what a step's sum is divided by.

loss = sum over the optimizer step of weight * token loss / sum over the optimizer step of `denominator`.
Both sums run over micro-batches and ranks, so the loss does not depend on how a step was cut.
"""

import torch

from gapo_megatron.loss.config import Aggregation


def token_weights(
    mask: torch.Tensor, sequence_ids: torch.Tensor, response_lengths: torch.Tensor, aggregation: Aggregation
) -> torch.Tensor:
    """Weight of each token.

    Args:
        mask: [num_tokens] bool (or 0 and 1), response tokens.
        sequence_ids: [num_tokens] long.
        response_lengths: [num_sequences] response tokens of each whole sequence, on all ranks that hold a part of it.
        aggregation: "token-mean" weighs tokens equally, "seq-mean-token-mean" sequences.

    Returns:
        [num_tokens] float64, 0 outside of the mask.
    """
    weights = mask.bool().double()
    if aggregation == "token-mean":
        return weights
    return weights / response_lengths.double().clamp(min=1)[sequence_ids]


def denominator(mask: torch.Tensor, response_lengths: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """This micro-batch's share of the optimizer step's denominator.

    Args:
        mask: [num_tokens] bool (or 0 and 1), response tokens.
        response_lengths: [num_sequences]. Of ranks that share a sequence, one counts it (pass zeros on the others).
        aggregation: as in `token_weights`.

    Returns:
        [] long: response tokens, or sequences with at least one response token.
    """
    counted = mask.bool() if aggregation == "token-mean" else response_lengths > 0
    return counted.sum()
