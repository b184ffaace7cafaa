"""Log-probs fused with the output projection, against full logits and autograd: time and memory of forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/logprob.py --output logprob.json

The full-logits way needs some 20 GB at the default size, over all ranks together: give fewer `--tokens` where it does not
fit. Times are medians of rounds in which the two ways take turns; memory is each way's peak in a process of its own, above
inputs that are there already. CPU or GPU, one per rank.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import clock, in_turn, peak_extra_bytes, report, run_ranks
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.log_probs import vocab_parallel_log_probs


class Problem:
    """bf16 hidden states [tokens, hidden], this rank's rows of the projection, labels, and upstream gradients [tokens]."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int, tensor_parallel: int) -> None:
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.vocabulary = vocabulary
        device = runtime.device()
        self.hidden = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        self.weight = torch.randn(vocabulary // tensor_parallel, hidden, dtype=torch.bfloat16, device=device)
        self.weight.mul_(hidden**-0.5)
        self.labels = torch.randint(0, vocabulary, (tokens,), device=device)
        self.upstream = torch.randn(tokens, device=device)
        for tensor in (self.hidden, self.labels, self.upstream):
            dist.broadcast(tensor, src=0)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def step(self, log_probs_of: Any) -> torch.Tensor:
        """Forward and backward; returns the log-probs."""
        self.hidden.grad = self.weight.grad = None
        log_probs, _ = log_probs_of(self)
        (log_probs * self.upstream).sum().backward()
        return log_probs.detach()


def fused(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours."""
    return vocab_parallel_log_probs(problem.hidden, problem.weight, problem.labels, problem.vocabulary, problem.group)


def full_logits(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits in fp32; Megatron's own cross entropy where ranks share the vocabulary."""
    logits = (problem.hidden @ problem.weight.t()).float()
    if problem.group.size() == 1:
        log_p = logits.log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(1, problem.labels[:, None]).squeeze(1), entropy
    with torch.no_grad():
        entropy = parallel_entropy(logits, problem.group)
    return -vocab_parallel_cross_entropy(logits[:, None], problem.labels[:, None]).squeeze(1), entropy


def parallel_entropy(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entropy [tokens] of distributions whose logits [tokens, vocabulary / TP] lie on several ranks."""
    maximum = logits.amax(dim=-1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    exponentials = (logits - maximum[:, None]).exp_()
    sums = torch.stack((exponentials.sum(dim=-1), exponentials.mul_(logits).sum(dim=-1)))
    dist.all_reduce(sums, group=group)
    return maximum + sums[0].log() - sums[1] / sums[0]


def join(tensor_parallel: int) -> None:
    """Build the groups of this rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    runtime.initialize(ParallelLayout(tensor_parallel, tensor_model_parallel_size=tensor_parallel))


WAYS = {"fused": fused, "full logits": full_logits}


def peak(way: str, *sizes: int) -> int:
    """Peak extra bytes of one way on this rank."""
    join(sizes[-1])
    Problem(64, *sizes[1:]).step(WAYS[way])  # what libraries allocate on first use is not counted
    problem = Problem(*sizes)
    return peak_extra_bytes(lambda: problem.step(WAYS[way]))


def times(rounds: int, *sizes: int) -> dict[str, Any]:
    """Seconds of each way on this rank, and how far their log-probs are apart."""
    join(sizes[-1])
    problem = Problem(*sizes)
    values = {}
    ways = {name: lambda n=name, f=way: values.update({n: problem.step(f)}) for name, way in WAYS.items()}
    measured: dict[str, Any] = in_turn(ways, rounds)
    measured["difference"] = float((values["fused"] - values["full logits"]).abs().max())
    return measured


def measure(tokens: int, hidden: int, vocabulary: int, tensor_parallel: int, rounds: int) -> dict[str, Any]:
    """A row of the table. Memory is the sum over ranks, time the slowest rank's."""
    sizes = (tokens, hidden, vocabulary, tensor_parallel)
    row: dict[str, Any] = {"TP": tensor_parallel, "tokens": tokens}
    memory = {way: sum(run_ranks(tensor_parallel, peak, way, *sizes)) for way in WAYS}
    for way, peak_bytes in memory.items():
        row[f"{way} MB"] = peak_bytes / 1e6
    row["memory ratio"] = memory["fused"] / memory["full logits"]
    ranks = run_ranks(tensor_parallel, times, rounds, *sizes)
    for kind in ("cpu", "wall"):
        for way in WAYS:
            row[f"{way} {kind} s"] = max(rank[way][kind] for rank in ranks)
    row["time ratio"] = row[f"fused {clock()} s"] / row[f"full logits {clock()} s"]
    row["largest difference"] = max(rank["difference"] for rank in ranks)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--tensor_parallel", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("logprob.json"))
    args = parser.parse_args()
    report(
        [measure(args.tokens, args.hidden, args.vocabulary, size, args.rounds) for size in args.tensor_parallel],
        args.output,
    )


if __name__ == "__main__":
    main()
