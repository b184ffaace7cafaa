"""Every family under every layout against one rank and against transformers, in fp32: one table.

    python -m tests.distributed.parity_matrix [--families llama mixtral] [--layouts TP2 CP2] [--output matrix.json]

A cell is the largest relative error of the layout, against transformers in one process and against one rank of ours. The
tests run a part of the same table.

Tolerance: both sides compute in fp32, whose rounding is 6e-8 relative per operation. Through a few layers and a softmax over
the vocabulary another order of summation moves log-probs near 10 by some 1e-5 at most; 1e-4 leaves room for that only. A
wrong sum over ranks, a wrong mask or a wrong head is off by far more. Gradients are compared relative to the largest entry
of their tensor, parameters after the optimizer steps relative to how far their tensor moved.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.distributed.policy_ranks import GROUP_SIZE, OPTIMIZER, make_rollouts, policy_on_ranks
from tests.distributed.ranks import RankPool
from tests.distributed.reference_policy import ReferencePolicy
from tests.tiny_models import CONFIGS, save_tiny_model

TOLERANCE = 1e-4

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2": (2, dict(tensor_model_parallel_size=2)),
    "TP2 + SP": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "PP2": (2, dict(pipeline_model_parallel_size=2)),
    "PP3": (3, dict(pipeline_model_parallel_size=3)),
    "PP2 x VPP2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "CP2": (2, dict(context_parallel_size=2)),
    "DP2": (2, {}),
    "TP2 x PP2": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "TP2 x CP2": (4, dict(tensor_model_parallel_size=2, context_parallel_size=2)),
    "PP2 x DP2": (4, dict(pipeline_model_parallel_size=2)),
    "PP2 x CP2": (4, dict(pipeline_model_parallel_size=2, context_parallel_size=2)),
    "EP2": (2, dict(expert_model_parallel_size=2)),
    "EP2 x CP2": (2, dict(expert_model_parallel_size=2, context_parallel_size=2)),
    "EP2 x PP2": (4, dict(expert_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "EP2 x TP2 + SP": (
        4,
        dict(expert_model_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    ),
}


@dataclass(frozen=True)
class Errors:
    """Largest errors of one run against another: absolute for log-probs, entropy and loss, else relative."""

    log_probs: float
    entropy: float
    loss: float
    gradients: float
    parameters: float

    @property
    def worst(self) -> float:
        return max(asdict(self).values())


def is_mixture(family: str) -> bool:
    return getattr(CONFIGS[family], "num_experts_per_tok", None) is not None


def exists(family: str, layout: str) -> bool:
    """Whether Megatron knows this layout for this family: experts under TP need SP, EP needs experts."""
    sizes = LAYOUTS[layout][1]
    if not is_mixture(family):
        return "expert_model_parallel_size" not in sizes
    return "tensor_model_parallel_size" not in sizes or sizes.get("sequence_parallel", False)


@cache
def reference(folder: Path, family: str) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Model folder, rollouts, and what transformers and autograd say of them."""
    path = save_tiny_model(folder, family)
    samples = make_rollouts(CONFIGS[family].vocab_size)
    policy = ReferencePolicy(path)
    with torch.no_grad():
        log_probs = [policy.log_probs(s["tokens"]) for s in samples]
        entropy = policy.mean_entropy(samples)
    arguments = (samples, log_probs, GROUP_SIZE)
    loss, gradients = policy.loss(*arguments).item(), policy.gradients(*arguments)
    initial = policy.parameters()
    parameters = policy.train(2, OPTIMIZER, *arguments)
    expected = dict(
        log_probs=[lp * s["response_mask"] for lp, s in zip(log_probs, samples, strict=True)],
        metrics=dict(policy_loss=loss, entropy=entropy),
        gradients=gradients,
        initial=initial,
        parameters=parameters,
    )
    return path, samples, dict(expected=expected, old_log_probs=log_probs)


def run(ranks: RankPool, folder: Path, family: str, layout: str, **options: Any) -> dict[str, Any]:
    """What our engine says of the same rollouts under `layout`."""
    path, samples, given = reference(folder, family)
    world_size, sizes = LAYOUTS[layout]
    return ranks.run(world_size, policy_on_ranks, path, sizes, samples, given["old_log_probs"], options)[0]


def compare(actual: dict[str, Any], expected: dict[str, Any], initial: dict[str, torch.Tensor]) -> Errors:
    """Errors of `actual` against `expected`; the same tensors must be there.

    Args:
        initial: the parameters before the optimizer steps.
    """

    def largest(key: str, scale) -> float:
        assert actual[key].keys() == expected[key].keys()
        return max(float((t - expected[key][n]).abs().max() / scale(n)) for n, t in actual[key].items())

    pairs = zip(actual["log_probs"], expected["log_probs"], strict=True)
    return Errors(
        log_probs=max(float((a - b).abs().max()) for a, b in pairs),
        entropy=abs(actual["metrics"]["entropy"] - expected["metrics"]["entropy"]),
        loss=abs(actual["metrics"]["policy_loss"] - expected["metrics"]["policy_loss"]),
        gradients=largest("gradients", lambda n: expected["gradients"][n].abs().max().clamp(min=1e-12)),
        parameters=largest("parameters", lambda n: (expected["parameters"][n] - initial[n]).abs().max()),
    )


def main() -> None:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(CONFIGS), default=sorted(CONFIGS))
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, help="write every error to this JSON file")
    args = parser.parse_args()

    cells = [(f, name) for f in args.families for name in args.layouts if exists(f, name)]
    errors: dict[str, dict[str, dict[str, Errors]]] = {f: {} for f in args.families}
    ranks = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        one_rank: dict[str, Any] = {}
        for family, layout in track(cells, "parity"):
            expected = reference(Path(folder), family)[2]["expected"]
            if family not in one_rank:
                one_rank[family] = run(ranks, Path(folder), family, "one rank")
            ours = one_rank[family] if layout == "one rank" else run(ranks, Path(folder), family, layout)
            errors[family][layout] = {
                "transformers": compare(ours, expected, expected["initial"]),
                "one rank": compare(ours, one_rank[family], expected["initial"]),
            }
    ranks.close()

    table = Table("family", *args.layouts, title="largest error: against transformers / against one rank")
    for family, row in errors.items():
        worst = {name: [e.worst for e in cell.values()] for name, cell in row.items()}
        table.add_row(family, *(" / ".join(f"{e:.0e}" for e in worst[n]) if n in worst else "-" for n in args.layouts))
    Console(width=24 + 18 * len(args.layouts)).print(table)
    if args.output:
        document = {f: {n: {a: asdict(e) for a, e in c.items()} for n, c in row.items()} for f, row in errors.items()}
        args.output.write_text(json.dumps(document, indent=2))
    failed = [
        (f, n) for f, row in errors.items() for n, c in row.items() if max(e.worst for e in c.values()) > TOLERANCE
    ]
    if failed:
        raise SystemExit(f"beyond the tolerance of {TOLERANCE}: {failed}")


if __name__ == "__main__":
    main()
