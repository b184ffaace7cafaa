"""OpenRLHF's real command with GAPO: Ray, vLLM, rewards from a function, and each of the two actors."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.openrlhf_run import train
from tests.tiny_models import save_tiny_policy

pytestmark = pytest.mark.slow

GAPO = ("--policy_loss", "gapo", "--eps_hi_max", "5e-3")
MEGATRON = (
    *("--actor.backend", "megatron", "--actor.num_gpus_per_node", "4"),
    *("--megatron.tensor_model_parallel_size", "2", "--megatron.pipeline_model_parallel_size", "2"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("model"))


def test_gapo_trains_with_a_megatron_actor_under_tensor_and_pipeline_parallelism(model, tmp_path):
    run = train(tmp_path, model, *GAPO, *MEGATRON, "--ckpt.save_steps", "2", num_gpus=5)
    first, second = run["metrics"]
    assert [first["backend"], first["policy_loss_type"]] == ["megatron", "gapo"]
    assert [first["weight_version"], second["weight_version"]] == [0, 1]
    # The trainer's own old log-probs, by the same kernels and packs as the training pass: no noise at all.
    assert first["log_s/noise_floor_max"] == second["log_s/noise_floor_max"] == 0
    assert first["optimizer_steps"] == 2 and first["actor_grad_norm"] > 0
    assert first["ppo_clip_ratio"] > 0 and first["log_s/max"] > 0
    saved = AutoModelForCausalLM.from_pretrained(run["out"], dtype=torch.bfloat16).state_dict()
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    assert saved.keys() == original.keys()
    assert all(torch.isfinite(t).all() for t in saved.values())
    assert not torch.equal(saved["model.embed_tokens.weight"], original["model.embed_tokens.weight"])

    again = train(
        tmp_path, model, *GAPO, *MEGATRON, "--ckpt.load_enable", "--train.num_episodes", "2", num_gpus=5, steps=2
    )
    resumed = again["metrics"][2:]
    assert [m["step"] for m in resumed] == [3, 4]
    # The resumed run sends its restored weights before the first rollout: version 3, then one a step.
    assert [m["weight_version"] for m in resumed] == [3, 4]
    assert resumed[0]["log_s/noise_floor_max"] == 0


def test_a_reference_model_an_entropy_term_and_dynamic_batching_with_a_megatron_actor(model, tmp_path):
    flags = (
        *("--actor.backend", "megatron", "--actor.num_gpus_per_node", "2", "--actor.entropy_coef", "1e-3"),
        *("--algo.kl.init_coef", "0.1", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"),
        *("--train.colocate_actor_ref", "--ref.num_gpus_per_node", "2"),
        *("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "128"),
        *("--train.batch_size", "32"),  # one optimizer step a batch
    )
    first, second = train(tmp_path, model, *GAPO, *flags, num_gpus=3)["metrics"]
    assert first["log_s/noise_floor_max"] == second["log_s/noise_floor_max"] == 0
    # The reference has met the same packs: before its first update the policy is exactly the reference.
    assert first["kl"] == first["logprobs_diff"] == 0 and first["optimizer_steps"] == 1
    assert second["kl"] > 0 and second["logprobs_diff"] != 0
    assert first["entropy"] > 0 and first["actor_grad_norm"] > 0


def test_kl_in_the_reward_with_a_reference_model_on_ranks_of_its_own(model, tmp_path):
    flags = (
        *("--actor.backend", "megatron", "--actor.num_gpus_per_node", "2"),
        *("--megatron.pipeline_model_parallel_size", "2", "--algo.kl.init_coef", "0.1", "--ref.num_gpus_per_node", "2"),
    )
    first, second = train(tmp_path, model, *GAPO, *flags, num_gpus=5)["metrics"]
    # The reference has met the same packs: the KL of the first batch is exactly 0, and that of the second is not.
    assert first["kl"] == first["logprobs_diff"] == 0
    assert second["kl"] != 0
    assert first["log_s/noise_floor_max"] == second["log_s/noise_floor_max"] == 0


def test_gapo_trains_with_openrlhfs_deepspeed_actor(model, tmp_path):
    flags = ("--actor.num_gpus_per_node", "1", "--ds.attn_implementation", "eager", "--ds.zero_stage", "2")
    run = train(tmp_path, model, *GAPO, *flags, num_gpus=2)
    first, second = run["metrics"]
    assert [first["backend"], first["policy_loss_type"]] == ["deepspeed", "gapo"]
    assert [first["weight_version"], second["weight_version"]] == [0, 1]
    assert first["group_size"] == 8 and 0 < first["group_correct"] < 8
    assert first["actor_grad_norm"] > 0 and first["ppo_clip_ratio"] > 0
    assert json.loads((run["out"] / "config.json").read_text())["model_type"] == "llama"
