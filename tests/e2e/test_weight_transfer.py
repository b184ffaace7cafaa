"""Megatron's weights, from two pipeline stages, into a running vLLM engine."""

import pytest
import ray

from benchmarks.rollout_mismatch import Policy, arguments, difference, vllm_log_probs
from gapo_megatron.demo.one_engine import start_engine
from tests.tiny_models import save_tiny_policy


@pytest.mark.slow
@pytest.mark.usefixtures("private_ray_session")
def test_vllm_scores_sequences_as_the_updated_policy_does(tmp_path):
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
