"""Whole checkpoints of an engine by Megatron's distributed checkpointing: weights, fp32 masters, moments, schedule.

A checkpoint is written beside its final place and renamed when every rank has finished, so that a folder that exists is
whole. It may be loaded under another layout: Megatron stores tensors by their global shape.
"""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gapo_megatron.megatron.engine import PolicyEngine

LATEST = "latest"
OURS = "client_state.pt"


def save(engine: PolicyEngine, folder: str, tag: str, client_state: dict[str, Any], max_num: int = 3) -> None:
    """Write `<folder>/<tag>` and point `<folder>/latest` at it. A collective of all ranks.

    Args:
        engine: its weights, optimizer and schedule are saved.
        folder: of all checkpoints of a run.
        tag: name of this one; an earlier one of the same name is replaced.
        client_state: anything that torch.save takes, returned by `load`.
        max_num: the oldest checkpoints beyond this number are removed, those whose tag starts with "best" excepted.
    """
    target = Path(folder) / tag
    temporary = target.with_name(f".{tag}.incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(engine, is_loading=False), str(temporary))
    if dist.get_rank() == 0:
        ours = {"client_state": client_state, "num_optimizers": len(_optimizers(engine))}
        torch.save(ours, temporary / OURS)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _write_latest(Path(folder), tag)
        _remove_oldest(Path(folder), max_num)
    dist.barrier()


def load(engine: PolicyEngine, folder: str) -> dict[str, Any]:
    """Restore the checkpoint that `<folder>/latest` names into `engine`; returns its client state.

    Raises:
        ValueError: there is no whole checkpoint in `folder`.
    """
    latest = Path(folder) / LATEST
    target = Path(folder) / latest.read_text().strip() if latest.exists() else None
    if target is None or not target.is_dir():
        raise ValueError(f"--ckpt.path: {folder} holds no whole checkpoint; start without --ckpt.load_enable")
    ours = torch.load(target / OURS, weights_only=False)
    if ours["num_optimizers"] != len(_optimizers(engine)):
        saved, fix = ("with", "above 1") if ours["num_optimizers"] > 1 else ("without", "of 1")
        raise ValueError(
            f"--megatron.expert_model_parallel_size: {target} was saved {saved} expert parallelism, which lays out the "
            f"optimizer's state otherwise; resume with a size {fix}, or start from a Hugging Face folder (--ckpt.save_hf)"
        )
    _prepare_torch_optimizers(engine)
    state = cast(dict, dist_checkpointing.load(_state(engine, is_loading=True), str(target)))
    for i, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(state["model"][str(i)])
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.scheduler.load_state_dict(state["scheduler"])
    return ours["client_state"]


def _state(engine: PolicyEngine, is_loading: bool) -> dict[str, Any]:
    engine.memory.require("parameters", "optimizer")
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": engine.groups.dp_cp,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    for distributed in _optimizers(engine):
        distributed.get_parameter_state_dp_zero = partial(_gather_state, distributed)  # type: ignore[method-assign]
    model = {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(engine.chunks)}
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "scheduler": engine.scheduler.state_dict()}


def _optimizers(engine: PolicyEngine) -> list[DistributedOptimizer]:
    """The optimizer of the dense parameters, and the one of the experts under expert parallelism."""
    return cast(list[DistributedOptimizer], cast(ChainedOptimizer, engine.optimizer).chained_optimizers)


def _gather_state(
    distributed: DistributedOptimizer,
    use_gloo_comm: bool = False,
    empty_data: bool = False,
    return_on_all_ranks: bool = True,
) -> dict[int, Any]:
    """Masters and moments of all data-parallel ranks, by buffer and data type: `get_parameter_state_dp_zero`.

    Megatron-Core 0.16.1 writes buckets one after the other and reads parameters at their places in the buffer, where
    buckets are padded. Tied embeddings on a pipeline's last stage are a bucket of their own, and what follows a padded
    bucket would be saved shifted.
    """
    group = distributed.data_parallel_group
    state: dict[int, Any] = {}
    for i, buffer in enumerate(distributed.buffers):
        ranges: dict = cast(Any, distributed.gbuf_ranges)[i]
        (dtype, bucket_ranges), *_ = ranges.items()
        if empty_data:
            bucket_ranges = []
        whole = {name: torch.zeros(buffer.numel, dtype=torch.float32) for name in ("param", "exp_avg", "exp_avg_sq")}
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges, strict=False):
            size = bucket.grad_data.numel() // group.size()
            for name, tensor in whole.items():
                mine = torch.zeros(size, dtype=torch.float32, device=bucket.grad_data.device)
                for parameter, place in bucket_range["param_map"].items():
                    at = place["gbuf_local"]
                    mine[at.start : at.end] = distributed._get_main_param_and_optimizer_states(parameter)[name]
                parts = [torch.empty_like(mine) for _ in range(group.size())]
                dist.all_gather(parts, mine, group=group)
                tensor[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(parts).cpu()
        state[i] = {dtype: whole}
    return state


def _prepare_torch_optimizers(engine: PolicyEngine) -> None:
    """Let Megatron load into torch's AdamW, which it uses where Transformer Engine and Apex are absent.

    Its loader describes what it wants by the optimizer's present state, which a fresh torch optimizer lacks, and does not
    expect the step count that torch keeps beside the moments.
    """
    for distributed in _optimizers(engine):
        inner = distributed.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter].update(step=torch.zeros(()), **moments)
        distributed._set_main_param_and_optimizer_states = partial(_set_parameter_state, distributed)  # type: ignore


def _set_parameter_state(distributed: DistributedOptimizer, model_param: torch.Tensor, tensors: dict) -> None:
    """Copy a parameter's master and moments; its step count is Megatron's, as a tensor of its own.

    Megatron puts one step tensor into every parameter's state, and torch would count it up once for each of them.
    """
    group, index = distributed.model_param_group_index_map[model_param]
    main_param = distributed.optimizer.param_groups[group]["params"][index]
    state = distributed.optimizer.state[main_param]
    state["step"] = state["step"].clone()
    main_param.data.copy_(tensors["param"])
    for name in ("exp_avg", "exp_avg_sq"):
        state[name].copy_(tensors[name])


def _write_latest(folder: Path, tag: str) -> None:
    temporary = folder / f".{LATEST}.incomplete"
    temporary.write_text(tag)
    os.replace(temporary, folder / LATEST)


def _remove_oldest(folder: Path, max_num: int) -> None:
    tags = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "best"))]
    for path in sorted(tags, key=lambda p: p.stat().st_mtime)[: max(0, len(tags) - max_num)]:
        shutil.rmtree(path)
