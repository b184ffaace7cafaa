"""Which Ray actor class plays a model: OpenRLHF's own DeepSpeed one, or ours on Megatron-Core."""

from typing import Any


def policy_actor(args: Any, deepspeed_actor: Any) -> Any:
    """The Ray actor class of the policy, by `--actor.backend`."""
    if args.actor.backend != "megatron":
        return deepspeed_actor
    import ray

    from gapo_megatron.openrlhf.megatron_actor import MegatronPolicyActor

    return ray.remote(num_gpus=1)(MegatronPolicyActor)


def reference_actor(args: Any, deepspeed_actor: Any) -> Any:
    """The Ray actor class of the reference model, by `--actor.backend`."""
    if args.actor.backend != "megatron":
        return deepspeed_actor
    import ray

    from gapo_megatron.openrlhf.megatron_reference_actor import MegatronReferenceActor

    return ray.remote(num_gpus=1)(MegatronReferenceActor)
