"""Log-probs of given tokens, fused with a vocabulary-parallel output projection.

The [tokens, vocabulary] logits never exist: forward and backward walk over blocks of the vocabulary, and the backward pass
recomputes each block's logits. Blocks of the vocabulary, not of tokens: a block's rows of the weight's gradient are then
one product over all tokens, so that they need no sum over blocks and no fp32 buffer of the weight's size.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

# Tokens and rows of the vocabulary whose logits are held in fp32 at one time. A CPU's fit its caches; a GPU's keep it busy.
TILES = {"cpu": (256, 2048), "cuda": (8192, 8192)}


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
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
        tile: tokens and rows whose logits are held in fp32 at one time; by default what suits the device.

    Returns:
        log-probs [num_tokens] and entropies [num_tokens] in nats, fp32 (fp64 for fp64 inputs), both with gradient.
    """
    start = group.rank() * weight.size(0)
    rows = max(0, min(weight.size(0), vocab_size - start))
    tile = tile or TILES[hidden.device.type]
    return _VocabParallelLogProbs.apply(hidden, weight, labels - start, group, temperature, rows, tile)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, local_labels, group, temperature, rows, tile):
        logits = _Logits(hidden, weight[:rows], temperature, tile)
        maximum = hidden.new_full((hidden.size(0),), -torch.inf, dtype=logits.dtype)
        # sum of exp(logit - max), sum of exp(logit - max) * logit, and the label's logit: one all-reduce for the three
        sums = hidden.new_zeros((3, hidden.size(0)), dtype=logits.dtype)
        scratch = torch.empty_like(logits.buffer)
        for rows_of_block, block in logits.blocks():
            column, owned = _column_of_label(local_labels, rows_of_block)
            for tokens, values in logits.tiles(block):
                sums[2, tokens] += values.gather(1, column[tokens]).squeeze(1) * owned[tokens]
                raised = torch.maximum(maximum[tokens], values.amax(dim=-1))
                sums[:2, tokens] *= (maximum[tokens] - raised).exp()
                maximum[tokens] = raised
                exponentials = torch.sub(values, raised[:, None], out=_view(scratch, values.shape)).exp_()
                sums[0, tokens] += exponentials.sum(dim=-1)
                sums[1, tokens] += exponentials.mul_(values).sum(dim=-1)

        if group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_maximum - maximum).exp()
            dist.all_reduce(sums, group=group)
        log_sum_exp = maximum + sums[0].log()
        log_probs = sums[2] - log_sum_exp
        entropy = log_sum_exp - sums[1] / sums[0]

        ctx.save_for_backward(hidden, weight, local_labels, log_sum_exp, entropy)
        ctx.settings = (temperature, rows, tile)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, local_labels, log_sum_exp, entropy = ctx.saved_tensors
        temperature, rows, tile = ctx.settings
        logits = _Logits(hidden, weight[:rows], temperature, tile)
        grad_hidden = torch.zeros(hidden.shape, dtype=logits.dtype, device=hidden.device)
        grad_weight = torch.zeros_like(weight)  # stays zero in rows of padding
        scratch = torch.empty_like(logits.buffer)
        has_entropy_term = bool(grad_entropy.any())  # a loss without one sends zeros
        scale, entropy_scale = (g[:, None] / temperature for g in (grad_log_probs, grad_entropy))
        for rows_of_block, block in logits.blocks():
            column, owned = _column_of_label(local_labels, rows_of_block)
            for tokens, values in logits.tiles(block):
                log_p = values.sub_(log_sum_exp[tokens, None])
                # d log p(label) / d logits = one_hot(label) - p
                if has_entropy_term:  # d entropy / d logits = -p (log p + entropy)
                    p = torch.exp(log_p, out=_view(scratch, log_p.shape))
                    factor = log_p.add_(entropy[tokens, None]).mul_(entropy_scale[tokens]).add_(scale[tokens])
                    grad_logits = p.mul_(factor.neg_())
                else:
                    grad_logits = log_p.exp_().mul_(-scale[tokens])
                grad_logits.scatter_add_(1, column[tokens], scale[tokens] * owned[tokens, None])
                block[tokens] = grad_logits
                grad_hidden[tokens] += block[tokens] @ weight[rows_of_block]
            torch.mm(block.t(), hidden, out=grad_weight[rows_of_block])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


class _Logits:
    """hidden @ weight.T, block by block of `weight`'s rows, and tile by tile of a block's tokens.

    Blocks and tiles are views of two buffers, each valid until the next one is taken. On a CPU fresh memory would cost more
    than the arithmetic: a page fault for each 4 KiB.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, tile: tuple[int, int]) -> None:
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.tokens, self.rows = min(tile[0], hidden.size(0)), min(tile[1], weight.size(0))
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.buffer = hidden.new_empty(self.tokens * self.rows, dtype=self.dtype)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows, and logits [num_tokens, rows] in `hidden`'s dtype; none on a rank that holds padding only."""
        buffer = self.hidden.new_empty(self.hidden.size(0) * self.rows)
        for rows in _slices(self.weight.size(0), self.rows):
            weight = self.weight[rows]
            block = _view(buffer, torch.Size((self.hidden.size(0), weight.size(0))))
            yield rows, torch.mm(self.hidden, weight.t(), out=block)

    def tiles(self, block: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Tokens, and their logits in `block` over the temperature [tokens, rows] in `dtype`."""
        for tokens in _slices(block.size(0), self.tokens):
            values = _view(self.buffer, block[tokens].shape).copy_(block[tokens])
            yield tokens, values if self.temperature == 1.0 else values.div_(self.temperature)


def _view(buffer: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return buffer[: shape.numel()].view(shape)


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, max(1, size))]


def _column_of_label(labels: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column among `rows` [num_tokens, 1] (any column where it is not there), and whether it is there."""
    owned = (labels >= rows.start) & (labels < rows.stop)
    return torch.where(owned, labels - rows.start, 0)[:, None], owned
