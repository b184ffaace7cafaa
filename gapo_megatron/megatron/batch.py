"""Rollouts -> packed micro-batches, cut by a token budget. Nothing is padded except to a multiple of TP."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gapo_megatron.megatron.packing import PackedSequences, local_tokens, pack_sequences, padded_lengths


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence and what the loss needs of it. Tensors are on the CPU.

    Attributes:
        tokens: [length] prompt and response.
        response_mask: [length - 1] bool; entry t is True where token t + 1 is a response token.
        old_log_probs, advantages: [length - 1] fp32, or None for a forward pass.
        eps_hi: upper clip width of this sequence (eq. 11), or None for a forward pass.
        base_log_probs: [length - 1] fp32 of the reference model, or None without a KL term.
    """

    tokens: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    eps_hi: float | None = None
    base_log_probs: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.tokens.numel()

    @property
    def response_length(self) -> int:
        """Response tokens."""
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end; under context parallelism, this rank's part of each.

    Attributes:
        input_ids, position_ids: [1, num_tokens]; positions count from 0 in each sequence.
        sequences: where each sequence lies, for the attention.
        response_positions: [num_response_tokens] positions among these tokens whose *next* token is a response token.
        response_index: [num_response_tokens] their places among all response tokens of the pack, in its order.
        labels: [num_response_tokens] those next tokens.
        sequence_ids: [num_response_tokens] the sequence each belongs to.
        response_lengths: [num_sequences] response tokens of each whole sequence, on all ranks together.
        old_log_probs, advantages: [num_response_tokens] fp32, eps_hi: [num_sequences] fp64; None for a forward pass.
        base_log_probs: [num_response_tokens] fp32, or None without a KL term.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequences: PackedSequences
    response_positions: torch.Tensor
    response_index: torch.Tensor
    labels: torch.Tensor
    sequence_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_log_probs: torch.Tensor | None
    advantages: torch.Tensor | None
    eps_hi: torch.Tensor | None
    base_log_probs: torch.Tensor | None


def partition(lengths: Sequence[int], max_tokens: int, num_parts: int = 1) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens` tokens with balanced sums.

    Longest first, each into the emptiest part. Depends on `lengths` alone, so that the old-log-prob pass and the
    training pass of one batch meet the same packs. A sequence longer than `max_tokens` gets a part of its own.

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of one part.
        num_parts: smallest number of parts; parts may be empty.

    Returns:
        indices into `lengths`, a list per part, ascending.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_parts = max(num_parts, -(-sum(lengths) // max_tokens))
    while True:
        parts: list[list[int]] = [[] for _ in range(num_parts)]
        sums = [0] * num_parts
        for i in order:
            target = min(range(num_parts), key=sums.__getitem__)
            parts[target].append(i)
            sums[target] += lengths[i]
        if all(total <= max_tokens or len(part) == 1 for total, part in zip(sums, parts, strict=True)):
            return [sorted(part) for part in parts]
        num_parts += 1


def pack(
    rollouts: Sequence[Rollout],
    device: torch.device,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
) -> MicroBatch:
    """Pack `rollouts` end to end on `device` and take this rank's part.

    An empty list gives a pack of padding with no response token: its rank still joins every collective.

    Args:
        context_parallel_size, context_parallel_rank: how sequences are cut, see `packing`.
        tensor_parallel_size: the pack becomes a multiple of it (1 without sequence parallelism).
    """
    lengths = padded_lengths([r.length for r in rollouts], context_parallel_size, tensor_parallel_size)
    mine = local_tokens(lengths, context_parallel_size, context_parallel_rank)

    def lay_out(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """One value per token of the whole pack; `parts` start where their sequences do."""
        whole = torch.zeros(sum(lengths), dtype=dtype)
        for part, start in zip(parts, accumulate(lengths, initial=0), strict=False):
            whole[start : start + part.numel()] = part
        return whole

    is_response = lay_out([r.response_mask for r in rollouts], torch.bool)
    here = is_response[mine]
    at = mine[here]

    def per_response_token(name: str) -> torch.Tensor | None:
        parts = [getattr(r, name) for r in rollouts]
        return None if any(p is None for p in parts) else lay_out(parts, torch.float32)[at].to(device)

    sequence_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    response_lengths = [r.response_length for r in rollouts] + [0] * (len(lengths) - len(rollouts))
    widths = [r.eps_hi for r in rollouts]
    return MicroBatch(
        input_ids=lay_out([r.tokens for r in rollouts], torch.long)[mine][None].to(device),
        position_ids=positions[mine][None].to(device),
        sequences=pack_sequences(lengths, context_parallel_size, context_parallel_rank, device),
        response_positions=here.nonzero().squeeze(1).to(device),
        response_index=(is_response.cumsum(0) - 1)[at].to(device),
        labels=lay_out([r.tokens[1:] for r in rollouts], torch.long)[at].to(device),
        sequence_ids=sequence_of_token[at].to(device),
        response_lengths=torch.tensor(response_lengths, dtype=torch.long, device=device),
        old_log_probs=per_response_token("old_log_probs"),
        advantages=per_response_token("advantages"),
        base_log_probs=per_response_token("base_log_probs"),
        eps_hi=None
        if None in widths
        else torch.tensor(widths + [0.0] * (len(lengths) - len(widths)), dtype=torch.float64, device=device),
    )
