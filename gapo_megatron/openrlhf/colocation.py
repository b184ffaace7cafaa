"""Actor and vLLM on the same devices (`--train.colocate_all`)."""

import os
from typing import Any


def check(args: Any) -> None:
    """Raises ValueError unless every actor rank shares its device with one vLLM worker."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    workers = args.vllm.num_engines * args.vllm.tensor_parallel_size
    if args.train.colocate_all and ranks != workers:
        raise ValueError(
            f"--train.colocate_all puts one vLLM worker beside each actor rank, but --actor.num_nodes x "
            f"--actor.num_gpus_per_node is {ranks} and --vllm.num_engines x --vllm.tensor_parallel_size is {workers}; "
            f"make them equal"
        )


def engine_shares_device() -> bool:
    """Whether the vLLM engine in this Ray actor has a fraction of each of its devices only.

    OpenRLHF gives an engine of one worker its fraction as the actor's resources. An engine of several workers has none
    itself, and passes its workers' fraction on in vLLM's own variable.
    """
    import ray

    share = os.environ.get("VLLM_RAY_PER_WORKER_GPUS")
    if share is None:
        share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1)
    return float(share) < 1
