"""Rollouts -> packed micro-batches, cut by a token budget. Nothing is padded except to a multiple of TP."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence and what the loss needs of it. Tensors are on the CPU.

    Attributes:
        tokens: [length] prompt and response.
        response_mask: [length - 1] bool; entry t is True where token t + 1 is a response token.
        old_log_probs, advantages: [length - 1] fp32, or None for a forward pass.
        eps_hi: upper clip width of this sequence (eq. 11), or None for a forward pass.
    """

    tokens: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    eps_hi: float | None = None

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
    """Sequences packed end to end.

    Attributes:
        input_ids, position_ids: [1, num_tokens].
        cu_seqlens: [num_sequences + 1] int32 bounds; the pad to a multiple of TP is one more sequence.
        response_positions: [num_response_tokens] positions in the pack whose *next* token is a response token.
        labels: [num_response_tokens] those next tokens.
        sequence_ids: [num_response_tokens] the sequence each belongs to.
        response_lengths: [num_sequences] response tokens of each sequence.
        old_log_probs, advantages: [num_response_tokens] fp32, eps_hi: [num_sequences] fp64; None for a forward pass.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    response_positions: torch.Tensor
    labels: torch.Tensor
    sequence_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_log_probs: torch.Tensor | None
    advantages: torch.Tensor | None
    eps_hi: torch.Tensor | None


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


def pack(rollouts: Sequence[Rollout], device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """Pack `rollouts` end to end on `device`, with a tail of pad tokens up to a multiple of `multiple_of`.

    An empty list gives a pack of padding with no response token: its rank still joins every collective.
    """
    lengths = [r.length for r in rollouts]
    padding = -sum(lengths) % multiple_of if rollouts else multiple_of
    lengths += [padding] if padding else []
    tokens = [r.tokens for r in rollouts] + [torch.zeros(padding, dtype=torch.long)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    positions, labels, sequence_ids = [], [], []
    for i, rollout in enumerate(rollouts):
        at = rollout.response_mask.nonzero().squeeze(1)
        positions.append(at + bounds[i])
        labels.append(rollout.tokens[at + 1])
        sequence_ids.append(torch.full_like(at, i))

    def per_token(name: str) -> torch.Tensor | None:
        values = [getattr(r, name) for r in rollouts]
        if any(v is None for v in values):
            return None
        return _cat([v[r.response_mask] for v, r in zip(values, rollouts, strict=True)], torch.float32).to(device)

    widths = [r.eps_hi for r in rollouts]
    return MicroBatch(
        input_ids=torch.cat(tokens).unsqueeze(0).to(device),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(device),
        cu_seqlens=bounds.to(torch.int32).to(device),
        response_positions=_cat(positions, torch.long).to(device),
        labels=_cat(labels, torch.long).to(device),
        sequence_ids=_cat(sequence_ids, torch.long).to(device),
        response_lengths=torch.tensor([r.response_length for r in rollouts], dtype=torch.long, device=device),
        old_log_probs=per_token("old_log_probs"),
        advantages=per_token("advantages"),
        eps_hi=None if None in widths else torch.tensor(widths, dtype=torch.float64, device=device),
    )


def _cat(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype)
