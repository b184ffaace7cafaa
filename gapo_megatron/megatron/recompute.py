"""Activation recompute: which activations the backward pass computes again instead of keeping."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Granularity = Literal["full", "selective"]
Module = Literal["core_attn", "mlp"]


@dataclass(frozen=True)
class Recompute:
    """In Megatron's terms. Gradients do not depend on it.

    Attributes:
        granularity: "full" keeps the input of each layer only, "selective" recomputes `modules`, None keeps everything.
        modules: with "selective", "core_attn" (attention without its projections) or "mlp" (also of experts) or both.
            Norms are part of the linear layers that follow them, so there is no "layernorm".
    """

    granularity: Granularity | None = None
    modules: tuple[Module, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        if self.granularity not in (None, *get_args(Granularity)):
            raise ValueError(f"--megatron.recompute_granularity must be full or selective, not {self.granularity}")
        if unknown := sorted(set(self.modules) - set(get_args(Module))):
            raise ValueError(
                f"--megatron.recompute_modules {unknown[0]} is not known; use {' or '.join(get_args(Module))}"
            )

    def megatron_arguments(self) -> dict[str, Any]:
        """Of Megatron's `TransformerConfig`."""
        if self.granularity == "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if self.granularity == "selective":
            moe = ["moe"] if "mlp" in self.modules else []  # Megatron's name for the MLP of a mixture of experts
            return {"recompute_granularity": "selective", "recompute_modules": [*self.modules, *moe]}
        return {}
