"""What the benchmarks share: ranks in processes of their own, meters of time and memory, and a table.

Ways are timed in turn, round by round, so that what else runs on the machine meets all of them alike.
"""

import gc
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_ranks(world_size: int, function: Callable, *args: Any) -> list[Any]:
    """`function(*args)` in `world_size` fresh processes, with the environment of torch.distributed; results by rank."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes, results = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
        process = context.Process(target=_rank, args=(theirs, environment, function, args), daemon=True)
        process.start()
        theirs.close()
        processes.append((process, ours))
    for rank, (process, pipe) in enumerate(processes):
        try:
            results.append(pipe.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} of {world_size} ended without a result; its error is above") from None
        process.join()
    return results


def _rank(pipe: Any, environment: dict[str, str], function: Callable, args: tuple) -> None:
    os.environ.update(environment, LOCAL_RANK=environment["RANK"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pipe.send(function(*args))


def seconds(action: Callable[[], object]) -> dict[str, float]:
    """Wall-clock and CPU seconds of `action`. Where there is no GPU and others use the machine, trust CPU seconds."""
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    _synchronize()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def in_turn(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over `rounds` of the seconds of each way."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(way))
    return {
        name: {clock: statistics.median(t[clock] for t in taken) for clock in ("wall", "cpu")}
        for name, taken in times.items()
    }


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Most memory that `action` held above what was held before it. For the CPU: a process that has done little before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock() -> str:
    """Which of `seconds` a ratio is taken from."""
    return "wall" if torch.cuda.is_available() else "cpu"


def report(rows: list[dict[str, Any]], output: Path) -> None:
    """Print `rows` as a table and write them to `output`."""
    names = list(rows[0])
    cells = [names] + [[_format(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    output.write_text(json.dumps(rows, indent=2) + "\n")


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
