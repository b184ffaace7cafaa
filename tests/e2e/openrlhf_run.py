"""OpenRLHF's real command, on a private Ray with as many schedulable "GPUs" as asked for."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REWARD = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    # A coin that depends on the response alone: half of a random policy's rollouts are "correct".
    rewards = torch.tensor([float(sum(map(ord, q[len(p):])) % 2) for q, p in zip(queries, prompts)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


@contextlib.contextmanager
def private_ray(num_gpus: int) -> Iterator[str]:
    """A Ray head of our own on a free port; yields its address, and ends it and nothing else."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        log = open(Path(folder) / "head.log", "w")  # noqa: SIM115
        head = subprocess.Popen(
            [
                *("ray", "start", "--head", "--block", "--port", "0", "--include-dashboard=false"),
                *("--disable-usage-stats", "--num-gpus", str(num_gpus), "--num-cpus", str(num_gpus + 4)),
                *("--temp-dir", folder, "--object-store-memory", str(512 << 20)),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _wait_for_address(Path(folder), head)
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            try:
                head.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
            log.close()


def _wait_for_address(folder: Path, head: subprocess.Popen, seconds: int = 60) -> str:
    import time

    for _ in range(seconds * 2):
        address = folder / "ray_current_cluster"
        if address.exists() and (text := address.read_text().strip()):
            return text
        assert head.poll() is None, (folder / "head.log").read_text()
        time.sleep(0.5)
    raise TimeoutError((folder / "head.log").read_text())


def train(folder: Path, model: str, *flags: str, num_gpus: int, steps: int = 2, timeout: int = 420) -> dict:
    """Run `openrlhf.cli.train_ppo_ray` for `steps` rollout batches; returns metrics, output folder and log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    prompts = [{"input": f"{i} + {i}", "label": str(2 * i)} for i in range(4 * steps)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray"),
        *("--actor.model_name_or_path", model, "--reward.remote_url", str(folder / "reward.py")),
        *("--data.prompt_dataset", str(folder / "prompts.jsonl"), "--data.input_key", "input"),
        *("--data.label_key", "label", "--data.apply_chat_template", "--data.max_len", "128"),
        *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--rollout.max_new_tokens", "12"),
        *("--rollout.micro_batch_size", "4", "--train.batch_size", "8", "--train.micro_batch_size", "4"),
        *("--algo.advantage.estimator", "dr_grpo", "--algo.kl.init_coef", "0"),
        *("--actor.adam.lr", "1e-3", "--actor.lr_scheduler", "constant"),
        *("--vllm.num_engines", "1", "--vllm.enforce_eager", "--vllm.sync_backend", "gloo"),
        *("--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "checkpoints"), *flags),
    ]
    with private_ray(num_gpus) as address:
        environment = {
            **os.environ,
            "RAY_ADDRESS": address,
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_DEDUP_LOGS": "0",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=folder, check=False
        )
    log = done.stdout + done.stderr
    (folder / "train.log").write_text(log)
    assert done.returncode == 0, log[-6000:]
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return {"metrics": [json.loads(line) for line in lines], "out": folder / "out", "log": log}
