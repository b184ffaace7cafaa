"""Megatron's weights into a running vLLM engine: the same log-probs, a version, and no hang when the engine dies."""

import time

import pytest
import ray

from benchmarks.rollout_mismatch import Policy, arguments, difference, start_engine, vllm_log_probs
from gapo_megatron.demo.private_ray import private_ray
from tests.tiny_models import save_tiny_policy


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with private_ray(4, 8, tmp_path_factory.mktemp("ray") / "ray.log") as address:
        ray.init(address=address)
        yield address
        ray.shutdown()


def test_weights_arrive_whole_and_a_dead_engine_is_an_error_within_its_time_out(address, tmp_path):
    from transformers import AutoTokenizer

    model = save_tiny_policy(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = [tokenizer(text)["input_ids"] for text in ("2 + 2 = 4", "hello there", "abc abc abc")]
    args = arguments(model, tmp_path)
    args.megatron.distributed_timeout_minutes = 0.5
    args.actor.adam.lr = 1e-2
    engine = start_engine(model)
    policy = Policy(args, engine, model)
    before, vllm_before = policy.log_probs(sequences), vllm_log_probs(engine, sequences)
    policy.train(sequences, before)
    after, synced = policy.log_probs(sequences), vllm_log_probs(engine, sequences)

    assert ray.get(engine.weight_version.remote()) == 1
    # The update is far larger than what bf16 kernels of vLLM and torch differ by, so stale weights would be seen.
    rounding = difference(vllm_before, before)["mean"]
    assert difference(after, before)["mean"] > 10 * rounding
    assert difference(synced, after)["mean"] < 3 * rounding

    ray.get(engine.start_weight_update.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="did not arrive whole; nothing is generated from them"):
        ray.get(engine.generate.remote(sequences[0], None))
    ray.get(policy.group.async_run_method("broadcast_to_vllm"))  # a whole transfer makes it servable again
    assert difference(vllm_log_probs(engine, sequences), synced)["max"] == 0
    assert ray.get(engine.weight_version.remote()) == 2

    ray.kill(engine)
    started = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match="vLLM failed in start_weight_update"):
        ray.get(policy.group.async_run_method("broadcast_to_vllm"), timeout=120)
    assert time.monotonic() - started < 60
