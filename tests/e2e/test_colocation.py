"""OpenRLHF's real command with actor ranks and vLLM engines on the same (schedulable) devices."""

import pytest

from tests.e2e.openrlhf_run import train
from tests.tiny_models import save_tiny_policy


@pytest.mark.slow
def test_a_sleeping_megatron_actor_trains_on_the_devices_of_its_vllm_engines(tmp_path):
    flags = (
        *("--policy_loss", "gapo", "--eps_hi_max", "5e-3", "--actor.backend", "megatron"),
        *("--actor.num_gpus_per_node", "2", "--megatron.pipeline_model_parallel_size", "2"),
        *("--train.colocate_all", "--ds.enable_sleep", "--vllm.num_engines", "2", "--ckpt.save_steps", "2"),
    )
    # Two devices: four processes fit because each takes a fraction of one.
    run = train(tmp_path, save_tiny_policy(tmp_path), *flags, num_gpus=2)
    first, second = run["metrics"]
    assert [first["weight_version"], second["weight_version"]] == [0, 1]
    # Log-probs before, and training after, a trip to the host: the same bits.
    assert first["log_s/noise_floor_max"] == second["log_s/noise_floor_max"] == 0
    assert first["optimizer_steps"] == 2 and first["actor_grad_norm"] > 0
    assert (run["out"] / "model.safetensors").exists() or (run["out"] / "model.safetensors.index.json").exists()
    assert (tmp_path / "checkpoints" / "_actor" / "latest").exists()
