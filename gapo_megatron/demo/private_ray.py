"""A Ray head of our own, which shares nothing with another one on the machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 90


@contextlib.contextmanager
def private_ray(num_gpus: int, num_cpus: int, log: Path) -> Iterator[str]:
    """Start a Ray head on a free port and yield its address; at the end stop it, and only it.

    Args:
        num_gpus: schedulable "GPUs", also where there are none.
        num_cpus: schedulable CPUs (Ray's bookkeeping, not threads).
        log: file for what Ray prints.

    Raises:
        ValueError: Ray did not start; names the log.
    """
    folder = Path(tempfile.mkdtemp(prefix="gapo-ray-"))  # short: Ray puts Unix sockets in it
    ray = Path(sys.executable).with_name("ray")
    with log.open("w") as output:
        head = subprocess.Popen(
            [
                *(str(ray), "start", "--head", "--block", "--port", "0", "--include-dashboard=false"),
                *("--disable-usage-stats", "--num-gpus", str(num_gpus), "--num-cpus", str(num_cpus)),
                *("--temp-dir", str(folder), "--object-store-memory", str(512 << 20)),
                # Free ports, because Ray's fixed range may be another cluster's.
                *("--min-worker-port", "0", "--max-worker-port", "0"),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield _address(folder, head, log)
        finally:
            stop_session(head)
            shutil.rmtree(folder, ignore_errors=True)


def _address(folder: Path, head: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    file = folder / "ray_current_cluster"
    while time.monotonic() < deadline and head.poll() is None:
        if file.exists() and (text := file.read_text().strip()):
            return text
        time.sleep(0.5)
    raise ValueError(f"Ray did not start within {START_SECONDS} seconds; see {log}")


def stop_session(process: subprocess.Popen, seconds: float = 20) -> None:
    """End a process that leads its own session, and every process of that group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            return
