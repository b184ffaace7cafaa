"""Log-probs of given tokens, fused with a vocabulary-parallel output projection.

The [tokens, vocabulary] logits never exist: forward and backward walk over chunks of tokens, and the backward pass
recomputes each chunk's logits from the saved log-sum-exp.
"""

import torch
import torch.distributed as dist

# Tokens per chunk: bounds the fp32 logits held at one time (e.g. 1,024 x 151,936 / TP x 4 bytes).
CHUNK_TOKENS = 1024


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `labels`, and the entropy of each distribution.

    Two all-reduces in forward (one MAX, one SUM, each of the whole batch), none in backward: `hidden` must be replicated
    over `group`, and its gradient is this rank's part of the sum over the vocabulary. The caller sums it over `group`
    (Megatron's `copy_to_tensor_model_parallel_region`, or the reduce-scatter of sequence parallelism).

    Args:
        hidden: [num_tokens, hidden_size].
        weight: [padded_vocab_size / TP, hidden_size], this rank's rows.
        labels: [num_tokens] token ids below `vocab_size`.
        vocab_size: rows at and beyond it are padding and take no part.
        group: the tensor-parallel group.
        temperature: divides the logits, as in sampling.

    Returns:
        log-probs [num_tokens] and entropies [num_tokens] in nats, fp32 (fp64 for fp64 inputs), both with gradient.
    """
    start = group.rank() * weight.size(0)
    rows = max(0, min(weight.size(0), vocab_size - start))
    return _VocabParallelLogProbs.apply(hidden, weight[:rows], labels - start, group, temperature, chunk_tokens)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, local_labels, group, temperature, chunk_tokens):
        rows = weight.size(0)
        owned = (local_labels >= 0) & (local_labels < rows)
        local_labels = torch.where(owned, local_labels, 0)

        dtype = torch.promote_types(hidden.dtype, torch.float32)
        maximum = hidden.new_full((hidden.size(0),), -torch.inf, dtype=dtype)
        # sum of exp(logit - max), sum of exp(logit - max) * logit, and the label's logit: one all-reduce for the three
        sums = hidden.new_zeros((3, hidden.size(0)), dtype=dtype)
        for chunk in _chunks(hidden.size(0), chunk_tokens, rows):
            logits = _logits(hidden[chunk], weight, temperature, dtype)
            maximum[chunk] = logits.amax(dim=-1)
            sums[2, chunk] = logits.gather(1, local_labels[chunk, None]).squeeze(1) * owned[chunk]
            exponentials = (logits - maximum[chunk, None]).exp_()
            sums[0, chunk] = exponentials.sum(dim=-1)
            sums[1, chunk] = exponentials.mul_(logits).sum(dim=-1)

        if group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_maximum - maximum).exp()
            dist.all_reduce(sums, group=group)
        log_sum_exp = maximum + sums[0].log()
        log_probs = sums[2] - log_sum_exp
        entropy = log_sum_exp - sums[1] / sums[0]

        ctx.save_for_backward(hidden, weight, local_labels, owned, log_sum_exp, entropy)
        ctx.settings = (temperature, chunk_tokens)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, local_labels, owned, log_sum_exp, entropy = ctx.saved_tensors
        temperature, chunk_tokens = ctx.settings
        dtype = log_sum_exp.dtype
        has_entropy_term = bool(grad_entropy.any())  # a loss without one sends zeros
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for chunk in _chunks(hidden.size(0), chunk_tokens, weight.size(0)):
            log_p = _logits(hidden[chunk], weight, temperature, dtype).sub_(log_sum_exp[chunk, None])
            # d log p(label) / d logits = one_hot(label) - p
            scale = grad_log_probs[chunk, None] / temperature
            if has_entropy_term:  # d entropy / d logits = -p (log p + entropy)
                entropy_scale = grad_entropy[chunk, None] / temperature
                grad_logits = log_p.exp().mul_(log_p.add_(entropy[chunk, None]).mul_(entropy_scale).add_(scale).neg_())
            else:
                grad_logits = log_p.exp_().mul_(-scale)
            grad_logits.scatter_add_(1, local_labels[chunk, None], scale * owned[chunk, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int, rows: int) -> list[slice]:
    """Slices of at most `chunk_tokens` tokens; none on a rank that holds padding only."""
    return [slice(i, i + chunk_tokens) for i in range(0, num_tokens if rows else 0, chunk_tokens)]


def _logits(hidden, weight, temperature, dtype):
    logits = (hidden @ weight.t()).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)
