"""Settings of every test: few threads, no network, and tests for GPUs only where there is one."""

import os

import pytest

# Before torch, Ray or transformers are imported; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu" if not os.path.exists("/dev/nvidiactl") else "cuda")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def private_ray_session(tmp_path_factory):
    """This process connected to a Ray of its own with 8 schedulable "GPUs"."""
    import ray

    from gapo_megatron.demo.private_ray import private_ray

    with private_ray(8, 16, tmp_path_factory.mktemp("ray") / "ray.log") as address:
        ray.init(address=address)
        yield
        ray.shutdown()


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
