"""A resumed engine continues exactly, also under another layout; a checkpoint is whole or absent."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron import checkpoint, runtime
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.optimizer import OptimizerSettings
from tests.distributed.policy_ranks import make_rollouts, to_rollouts
from tests.tiny_models import save_tiny_model

# A decaying rate, so that a schedule which starts again is seen.
SETTINGS = OptimizerSettings(lr=1e-2, schedule="linear", warmup_ratio=0.0, total_steps=8)


def train_and_save(model_path: str, sizes: dict, dtype: torch.dtype, folder: str, resume: bool, steps: int):
    """Train `steps` steps, from the checkpoint in `folder` if `resume`; save; return weights and client state."""
    layout = ParallelLayout(world_size=int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(layout, timeout_minutes=2)
    engine = PolicyEngine(model_path, EngineConfig(layout, dtype, max_tokens=64, optimizer=SETTINGS))
    client_state = checkpoint.load(engine, folder) if resume else {"global_step": 0}
    samples = make_rollouts(engine.hf_config.vocab_size)
    old = [torch.full((s["tokens"].numel() - 1,), -5.0) for s in samples]
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = slice(rank * len(samples) // size, (rank + 1) * len(samples) // size)
    rollouts = to_rollouts(samples[mine], PolicyLossConfig(), old[mine])
    for _ in range(steps):
        metrics = engine.train_step(rollouts)
        client_state["global_step"] += 1
    if steps:
        checkpoint.save(engine, folder, f"global_step{client_state['global_step']}", client_state, max_num=2)
    weights = {name: tensor.clone() for name, tensor in engine.weights}
    return (weights, client_state, metrics["lr"] if steps else None) if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("qwen2", torch.float32, dict(tensor_model_parallel_size=2)),
        ("qwen2", torch.bfloat16, dict(tensor_model_parallel_size=2, context_parallel_size=2)),
        ("llama-tied", torch.bfloat16, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
        ("qwen3-moe", torch.bfloat16, dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2)),
    ],
)
def test_a_resumed_run_continues_exactly(ranks, tmp_path, name, dtype, sizes):
    path = save_tiny_model(tmp_path, name, dtype)

    def run(folder: str, resume: bool, steps: int):
        return ranks.run(4, train_and_save, path, sizes, dtype, str(tmp_path / folder), resume, steps)[0]

    whole, state, lr = run("whole", False, 4)
    run("halves", False, 2)
    resumed, resumed_state, resumed_lr = run("halves", True, 2)
    assert (resumed_state, resumed_lr) == (state, lr) and state["global_step"] == 4
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("llama-tied", (2, dict(tensor_model_parallel_size=2)), (4, dict(pipeline_model_parallel_size=2))),
        (
            "llama-tied",
            (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
            (2, dict(context_parallel_size=2)),
        ),
        (
            "mixtral",
            (2, dict(expert_model_parallel_size=2)),
            (4, dict(expert_model_parallel_size=2, pipeline_model_parallel_size=2)),
        ),
    ],
)
def test_a_checkpoint_loads_under_another_layout(ranks, tmp_path, name, before, after):
    path = save_tiny_model(tmp_path, name)
    folder = str(tmp_path / "checkpoints")
    (saved_ranks, saved_sizes), (loaded_ranks, loaded_sizes) = before, after
    saved, _, _ = ranks.run(saved_ranks, train_and_save, path, saved_sizes, torch.float32, folder, False, 2)[0]
    loaded, state, _ = ranks.run(loaded_ranks, train_and_save, path, loaded_sizes, torch.float32, folder, True, 0)[0]
    assert state["global_step"] == 2
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_checkpoint_with_expert_parallelism_is_not_resumed_without(ranks, tmp_path):
    path, folder = save_tiny_model(tmp_path, "mixtral"), str(tmp_path / "checkpoints")
    ranks.run(2, train_and_save, path, dict(expert_model_parallel_size=2), torch.float32, folder, False, 1)
    with pytest.raises(RuntimeError, match="was saved with expert parallelism.*resume with a size above 1"):
        ranks.run(1, train_and_save, path, {}, torch.float32, folder, True, 0)


def test_only_the_newest_checkpoints_stay_and_an_interrupted_one_is_not_loaded(ranks, tmp_path):
    path = save_tiny_model(tmp_path, "llama")
    folder = tmp_path / "checkpoints"
    for resume in (False, True, True):
        ranks.run(1, train_and_save, path, {}, torch.float32, str(folder), resume, 1)
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["global_step2", "global_step3"]
    (Path(folder) / ".global_step4.incomplete").mkdir()
    _, state, _ = ranks.run(1, train_and_save, path, {}, torch.float32, str(folder), True, 0)[0]
    assert state["global_step"] == 3


def test_an_empty_folder_is_refused_by_name(ranks, tmp_path):
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(RuntimeError, match="--ckpt.path: .* holds no whole checkpoint"):
        ranks.run(1, train_and_save, path, {}, torch.float32, str(tmp_path / "none"), True, 0)
