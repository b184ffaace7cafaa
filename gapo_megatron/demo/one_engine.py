"""One vLLM engine of OpenRLHF's own class, outside of a training run: for benchmarks and tests."""

from typing import Any

READY_SECONDS = 600


def start_engine(model: str, tensor_parallel_size: int = 1, prefix_caching: bool = False) -> Any:
    """A Ray handle of an engine that is ready to serve `model`; Ray must be initialized, and OpenRLHF patched."""
    import ray
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    (engine,) = create_vllm_engines(
        num_engines=1,
        tensor_parallel_size=tensor_parallel_size,
        pretrain=model,
        seed=0,
        full_determinism=False,
        enable_prefix_caching=prefix_caching,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.5,
    )
    ray.get(engine.weight_version.remote(), timeout=READY_SECONDS)
    return engine
