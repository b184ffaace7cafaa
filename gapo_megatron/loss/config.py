"""The policy loss's settings."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

ImportanceLevel = Literal["sequence", "token"]
ClipSchedule = Literal["linear", "exponential", "fixed"]
Aggregation = Literal["token-mean", "seq-mean-token-mean"]


@dataclass(frozen=True)
class PolicyLossConfig:
    """Clipped policy loss with group-adaptive upper clip (GAPO); the defaults are the paper's.

    Attributes:
        importance_level: one ratio per sequence (eq. 13) or one per token.
        eps_lo: lower clip width, and the smallest upper one (c = k).
        eps_hi_max: largest upper clip width (c = 1).
        clip_schedule: eq. 11 (linear), eq. 9 without linearization (exponential), or eps_hi_max for all (fixed).
        aggregation: mean over response tokens, or mean over sequences of their token means.
        dual_clip: cap on the ratio of negative advantages, or None.
        correct_threshold: a rollout is correct when its verifier's reward is at least this.
    """

    importance_level: ImportanceLevel = "sequence"
    eps_lo: float = 3e-3
    eps_hi_max: float = 5e-3
    clip_schedule: ClipSchedule = "linear"
    aggregation: Aggregation = "token-mean"
    dual_clip: float | None = None
    correct_threshold: float = 0.5

    def __post_init__(self) -> None:
        _one_of("--importance_level", self.importance_level, ImportanceLevel)
        _one_of("--clip_schedule", self.clip_schedule, ClipSchedule)
        _one_of("--actor.loss_agg_mode", self.aggregation, Aggregation)
        for flag, width in (("--eps_lo", self.eps_lo), ("--eps_hi_max", self.eps_hi_max)):
            if not math.isfinite(width) or width < 0:
                raise ValueError(f"{flag} must be a finite number >= 0, not {width}; the paper uses 3e-3 and 5e-3")
        if self.eps_lo >= 1:
            raise ValueError(f"--eps_lo must be below 1, not {self.eps_lo}: the ratio is never below 1 - eps_lo = 0")
        if self.eps_hi_max < self.eps_lo:
            raise ValueError(
                f"--eps_hi_max {self.eps_hi_max:g} is below --eps_lo {self.eps_lo:g}; "
                f"give an --eps_hi_max of at least {self.eps_lo:g}, or a smaller --eps_lo"
            )
        if self.dual_clip is not None and not (math.isfinite(self.dual_clip) and self.dual_clip > 1):
            raise ValueError(f"--actor.dual_clip must be a finite number above 1, not {self.dual_clip}")
        if not math.isfinite(self.correct_threshold):
            raise ValueError(f"--correct_threshold must be a finite number, not {self.correct_threshold}")


def _one_of(flag: str, value: str, literal: object) -> None:
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
