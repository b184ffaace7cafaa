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
        torch.save(client_state, temporary / "client_state.pt")
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
    _prepare_torch_optimizers(engine)
    state = cast(dict, dist_checkpointing.load(_state(engine, is_loading=True), str(target)))
    for i, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(state["model"][str(i)])
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.scheduler.load_state_dict(state["scheduler"])
    return torch.load(target / "client_state.pt", weights_only=False)


def _state(engine: PolicyEngine, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": engine.groups.dp_cp,
        "singleton_local_shards": False,
    }
    model = {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(engine.chunks)}
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "scheduler": engine.scheduler.state_dict()}


def _prepare_torch_optimizers(engine: PolicyEngine) -> None:
    """Let Megatron load into torch's AdamW, which it uses where Transformer Engine and Apex are absent.

    Its loader describes what it wants by the optimizer's present state, which a fresh torch optimizer lacks, and does not
    expect the step count that torch keeps beside the moments.
    """
    for distributed in cast(list[DistributedOptimizer], cast(ChainedOptimizer, engine.optimizer).chained_optimizers):
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
