"""OpenRLHF's real command, on a private Ray with as many schedulable "GPUs" as asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gapo_megatron.demo.private_ray import private_ray

REWARD = """
import zlib

import torch

def reward_func(queries, prompts, labels, **kwargs):
    # A coin that depends on the response alone: half of a random policy's rollouts are "correct".
    rewards = torch.tensor([float(zlib.crc32(q[len(p):].encode()) % 2) for q, p in zip(queries, prompts)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


def train(folder: Path, model: str, *flags: str, num_gpus: int, steps: int = 2, timeout: int = 420) -> dict:
    """Run `openrlhf.cli.train_ppo_ray` for `steps` rollout batches; returns metrics, output folder and log.

    Each of a step's two mini-batches holds two groups of 8: that all of them are all right or all wrong, and the mini-batch
    without gradient, has a chance of 1 in 16,000.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    prompts = [{"input": f"{i} + {i}", "label": str(2 * i)} for i in range(4 * steps)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray"),
        *("--actor.model_name_or_path", model, "--reward.remote_url", str(folder / "reward.py")),
        *("--data.prompt_dataset", str(folder / "prompts.jsonl"), "--data.input_key", "input"),
        *("--data.label_key", "label", "--data.apply_chat_template", "--data.max_len", "128"),
        *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "8", "--rollout.max_new_tokens", "12"),
        *("--rollout.micro_batch_size", "4", "--train.batch_size", "16", "--train.micro_batch_size", "4"),
        *("--algo.advantage.estimator", "dr_grpo", "--algo.kl.init_coef", "0"),
        *("--actor.adam.lr", "1e-3", "--actor.lr_scheduler", "constant"),
        *("--vllm.num_engines", "1", "--vllm.enforce_eager", "--vllm.sync_backend", "gloo"),
        *("--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "checkpoints"), *flags),
    ]
    with private_ray(num_gpus, num_gpus + 4, folder / "ray.log") as address:
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
