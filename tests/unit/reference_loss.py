"""GAPO written from the paper in plain Python: no torch, no vectors, no stop-gradient form.

Derivatives come from forward-mode dual numbers through eq. 13 as it is printed, so nothing here was differentiated by hand.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Dual:
    """A value and its derivatives, keyed by (sequence, token)."""

    value: float
    grad: dict[tuple[int, int], float] = field(default_factory=dict)

    def __add__(self, other: "Dual") -> "Dual":
        keys = self.grad.keys() | other.grad.keys()
        return Dual(self.value + other.value, {k: self.grad.get(k, 0.0) + other.grad.get(k, 0.0) for k in keys})

    def scaled(self, factor: float) -> "Dual":
        return Dual(self.value * factor, {k: g * factor for k, g in self.grad.items()})

    def exp(self) -> "Dual":
        e = math.exp(self.value)
        return Dual(e, {k: g * e for k, g in self.grad.items()})

    def clip(self, low: float, high: float) -> "Dual":
        if self.value < low:
            return Dual(low)
        if self.value > high:
            return Dual(high)
        return self


@dataclass
class Sequence:
    """One rollout: per token (log pi_theta, log pi_old, is a response token), its reward, and its prompt."""

    tokens: list[tuple[float, float, bool]]
    reward: int
    prompt: int


@dataclass
class Result:
    """Loss, its derivative in every token's log-prob, clip widths, advantages, and counts of clipped tokens."""

    loss: float
    gradient: list[list[float]]
    eps_hi: list[float]
    advantages: list[float]
    clipped_upper: int
    clipped_lower: int


def advantage(reward: int, c: int, k: int) -> float:
    """Eq. 2."""
    return reward - c / k


def eps_hi(reward: int, c: int, k: int, eps_lo: float, eps_hi_max: float, schedule: str) -> float:
    """Eq. 11, or eq. 9 with the lambda and offset that meet the same two ends, or the fixed width of the baselines."""
    if schedule == "fixed":
        return eps_hi_max
    if reward == 0:
        return eps_lo
    if schedule == "linear":
        return eps_lo + (eps_hi_max - eps_lo) * (k - c) / (k - 1)
    # 1 + eps = scale * exp(A / lambda) with eps(c = k) = eps_lo at A = 0 and eps(c = 1) = eps_hi_max at A = (k - 1) / k
    inverse_lambda = math.log((1 + eps_hi_max) / (1 + eps_lo)) * k / (k - 1)
    return (1 + eps_lo) * math.exp(advantage(1, c, k) * inverse_lambda) - 1


def reference(
    batch: list[Sequence],
    level: str,
    schedule: str,
    aggregation: str,
    eps_lo: float,
    eps_hi_max: float,
    dual_clip: float | None = None,
) -> Result:
    """Loss and gradient of a whole optimizer step."""
    total = Dual(0.0)
    widths, advantages, upper, lower = [], [], 0, 0
    lengths = [sum(inside for _, _, inside in sequence.tokens) for sequence in batch]
    for i, sequence in enumerate(batch):
        group = [other.reward for other in batch if other.prompt == sequence.prompt]
        c, k = sum(group), len(group)
        a = advantage(sequence.reward, c, k)
        width = eps_hi(sequence.reward, c, k, eps_lo, eps_hi_max, schedule)
        widths.append(width)
        advantages.append(a)
        log_ratios = [Dual(new - old, {(i, t): 1.0}) for t, (new, old, inside) in enumerate(sequence.tokens) if inside]
        if level == "sequence" and log_ratios:  # eq. 13: the same s_i for every token
            mean = sum(log_ratios, Dual(0.0)).scaled(1 / len(log_ratios))
            log_ratios = [mean] * len(log_ratios)
        for log_ratio in log_ratios:
            s = log_ratio.exp()
            plain, clipped = s.scaled(-a), s.clip(1 - eps_lo, 1 + width).scaled(-a)
            loss = plain if plain.value > clipped.value else clipped  # eq. 12
            upper += a > 0 and s.value > 1 + width
            lower += a < 0 and s.value < 1 - eps_lo
            if dual_clip is not None and a < 0 and loss.value > -dual_clip * a:
                loss = Dual(-dual_clip * a)
            total = total + (loss if aggregation == "token-mean" else loss.scaled(1 / lengths[i]))
    count = sum(lengths) if aggregation == "token-mean" else sum(n > 0 for n in lengths)
    total = total.scaled(1 / max(count, 1))
    gradient = [[total.grad.get((i, t), 0.0) for t in range(len(s.tokens))] for i, s in enumerate(batch)]
    return Result(total.value, gradient, widths, advantages, upper, lower)
