"""Which Ray actor class plays the policy: OpenRLHF's own DeepSpeed one, or ours on Megatron-Core."""

from typing import Any


def policy_actor(args: Any, deepspeed_actor: Any) -> Any:
    """The Ray actor class for `RayActorGroup`, by `--actor.backend`."""
    if args.actor.backend != "megatron":
        return deepspeed_actor
    import ray

    from gapo_megatron.openrlhf.megatron_actor import MegatronPolicyActor

    return ray.remote(num_gpus=1)(MegatronPolicyActor)


def reference_actor(args: Any, deepspeed_actor: Any) -> Any:
    """The Ray actor class of the reference model. `arguments.resolve` refuses one under the Megatron backend."""
    assert args.actor.backend != "megatron", "a reference model needs --actor.backend deepspeed"
    return deepspeed_actor
