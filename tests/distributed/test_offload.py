"""Offload and reload between phases: the device memory is really free, and training continues as if nothing had been.

Exact: bytes are copied, nothing is computed.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.megatron import checkpoint, runtime
from gapo_megatron.megatron.engine import EngineConfig, PolicyEngine
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.offload import PARTS
from gapo_megatron.openrlhf.sleep import SleepMixin
from tests.distributed.policy_ranks import OPTIMIZER, make_rollouts, to_rollouts
from tests.tiny_models import save_tiny_model


def build(model_path: str, dtype: torch.dtype, sizes: dict[str, Any]):
    """An engine, and this rank's rollouts."""
    layout = ParallelLayout(world_size=int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(layout, timeout_minutes=2)
    engine = PolicyEngine(model_path, EngineConfig(layout, dtype, max_tokens=64, optimizer=OPTIMIZER))
    samples = make_rollouts(engine.hf_config.vocab_size)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = slice(rank * len(samples) // size, (rank + 1) * len(samples) // size)
    old = [torch.full((s["tokens"].numel() - 1,), -5.0) for s in samples]
    return engine, to_rollouts(samples[mine], PolicyLossConfig(), old[mine])


def device_bytes(engine: PolicyEngine) -> dict[str, int]:
    """Bytes in the storages behind parameters, gradients, masters and moments."""
    parameters = [p for chunk in engine.ddp for p in chunk.parameters()]
    optimizers = [o.optimizer for o in engine.optimizer.chained_optimizers]
    masters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    moments = [state[name] for o in optimizers for state in o.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = dict(parameters=parameters, gradients=[p.main_grad for p in parameters], masters=masters, moments=moments)
    return {name: sum(t.untyped_storage().nbytes() for t in tensors) for name, tensors in tensors.items()}


def train(model_path: str, dtype: torch.dtype, sizes: dict[str, Any], phases: bool) -> dict[str, Any]:
    """Three steps; with `phases` everything goes to the host before each of them and in between."""
    engine, rollouts = build(model_path, dtype, sizes)
    result: dict[str, Any] = {"metrics": [], "offloaded": []}
    for _ in range(3):
        if phases:
            engine.offload()
            engine.offload()  # a second one does nothing
            result["offloaded"].append(device_bytes(engine))
            engine.reload("parameters")
        result["log_probs"] = engine.log_probs(rollouts)
        if phases:
            engine.reload()
        result["metrics"].append(engine.train_step(rollouts))
        if phases:
            engine.offload("optimizer", "gradients")
        result["parameters"] = {name: tensor.clone() for name, tensor in engine.weights}
    engine.reload()
    result["resident"] = device_bytes(engine)
    return result


@pytest.mark.parametrize(
    ("dtype", "world_size", "sizes"),
    [
        (torch.float32, 1, {}),  # masters are views of the parameters
        # Masters of their own, sharded over two replicas, and a tied embedding on both stages.
        (torch.bfloat16, 4, dict(pipeline_model_parallel_size=2)),
    ],
)
def test_training_continues_exactly_and_nothing_stays_on_the_device(ranks, tmp_path, dtype, world_size, sizes):
    path = save_tiny_model(tmp_path, "llama-tied", dtype)
    plain = ranks.run(world_size, train, path, dtype, sizes, False)
    phased = ranks.run(world_size, train, path, dtype, sizes, True)
    for a, b in zip(plain, phased, strict=True):
        assert a["metrics"] == b["metrics"]
        assert all(torch.equal(x, y) for x, y in zip(a["log_probs"], b["log_probs"], strict=True))
        assert all(torch.equal(a["parameters"][name], tensor) for name, tensor in b["parameters"].items())
        assert all(not any(step.values()) for step in b["offloaded"])
        assert a["resident"] == b["resident"] and all(a["resident"].values())


def use_while_offloaded(model_path: str, folder: str) -> list[str]:
    """What each use of an offloaded engine says."""
    engine, rollouts = build(model_path, torch.bfloat16, {})
    uses = {
        "parameters": (engine.log_probs, engine.compute_gradients, lambda _: list(engine.weights)),
        "gradients": (engine.compute_gradients, engine.train_step),
        "optimizer": (engine.train_step, lambda _: checkpoint.save(engine, folder, "tag", {}, 1)),
    }
    said = []
    for part in PARTS:
        engine.offload(part)
        for use in uses[part]:
            with pytest.raises(RuntimeError) as error:
                use(rollouts)
            said.append(f"{part}: {error.value}")
        engine.reload(part)
    engine.train_step(rollouts)
    dist.barrier()
    return said


def test_an_offloaded_engine_says_so_when_it_is_used(ranks, tmp_path):
    said = ranks.run(1, use_while_offloaded, save_tiny_model(tmp_path, "llama", torch.bfloat16), str(tmp_path))[0]
    assert len(said) == 7
    for line in said:
        part = line.partition(":")[0]
        assert line.endswith(f"the engine is offloaded ({part}); call reload() before using it")


def bytes_while_awake(model_path: str, enable_sleep: bool) -> list[dict[str, int]]:
    """Device bytes of an actor's engine during and after a call that needs the parameters."""
    actor = SleepMixin()
    actor.engine, rollouts = build(model_path, torch.bfloat16, {})
    actor.args = SimpleNamespace(ds=SimpleNamespace(enable_sleep=enable_sleep))
    actor.engine.train_step(rollouts)  # makes the moments
    if enable_sleep:
        actor.offload_states()
    with actor.awake("parameters"):
        actor.engine.log_probs(rollouts)
        during = device_bytes(actor.engine)
    after = device_bytes(actor.engine)
    actor.reload_states()
    return [during, after, device_bytes(actor.engine)]


def test_a_sleeping_actor_has_on_its_device_what_a_call_needs_and_nothing_afterwards(ranks, tmp_path):
    path = save_tiny_model(tmp_path, "llama", torch.bfloat16)
    during, after, reloaded = ranks.run(1, bytes_while_awake, path, True)[0]
    assert [name for name, count in during.items() if count] == ["parameters"]
    assert not any(after.values())
    assert [reloaded] * 2 == ranks.run(1, bytes_while_awake, path, False)[0][:2]
