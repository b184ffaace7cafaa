"""A pool of processes that run a function as ranks of a real gloo group.

Importing torch, Megatron-Core and transformers takes seconds; the pool pays it once for all tests of a session.
"""

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

MAX_RANKS = 4
# Megatron's mixtures of experts leave their process groups behind, and each of gloo's groups holds threads.
MAX_THREADS = 120


class RankPool:
    """Up to `MAX_RANKS` workers. `run(n, function, *args)` calls `function(*args)` on n of them as ranks 0 to n - 1."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Any]] = []

    def run(self, world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
        """Results by rank. `function` must be importable; raises RuntimeError with the first failing rank's traceback."""
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            # Not a daemon: Megatron's checkpoint writer starts processes of its own. `_serve` ends with our pipe.
            process = self._context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((rank, world_size, port, function, args))
        results = []
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            answer = pipe.recv() if pipe.poll(timeout) else (None, f"no answer within {timeout} s")
            if answer[1] is not None:
                self.close()
                raise RuntimeError(f"rank {rank} of {world_size}: {answer[1]}")
            results.append(answer[0])
        if any(len(os.listdir(f"/proc/{process.pid}/task")) > MAX_THREADS for process, _ in self._workers):
            self.close()
        return results

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for _, pipe in self._workers:
            pipe.close()  # `_serve` returns, and with it goes what a worker has started
        for process, _ in self._workers:
            process.join(timeout=10)
            process.kill()
        self._workers.clear()


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        finally:
            _leave_process_group()


def _leave_process_group() -> None:
    from gapo_megatron.megatron import runtime

    runtime.finalize()
    gc.collect()  # an engine is a cycle that holds its groups, and each of gloo's groups holds threads
