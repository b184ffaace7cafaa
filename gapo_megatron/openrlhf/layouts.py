"""The parallel layouts that a command line asks for: of the actor, and of the reference model."""

import math
from dataclasses import fields, replace
from typing import Any

from gapo_megatron.megatron.layout import ParallelLayout


def actor_layout(args: Any) -> ParallelLayout:
    """The layout of the actor's ranks, checked against the model; a ValueError is one sentence with flag and fix."""
    layout = ParallelLayout(
        world_size=args.actor.num_nodes * args.actor.num_gpus_per_node,
        **{
            field.name: getattr(args.megatron, field.name)
            for field in fields(ParallelLayout)
            if field.name != "world_size"
        },
    )
    _check_model(args.actor.model_name_or_path, layout)
    return layout


def reference_layout(args: Any) -> ParallelLayout | None:
    """The actor's layout over the reference model's ranks, or None where there is no reference model on Megatron."""
    layout = args.megatron_layout
    if layout is None or args.algo.kl.init_coef <= 0:
        return None
    ref, actor = args.ref, args.actor
    same = (ref.num_nodes, ref.num_gpus_per_node) == (actor.num_nodes, actor.num_gpus_per_node)
    if (args.train.colocate_actor_ref or args.train.colocate_all) and not same:
        flag = "--train.colocate_all" if args.train.colocate_all else "--train.colocate_actor_ref"
        raise ValueError(
            f"{flag} puts the reference model on the actor's GPUs; set --ref.num_nodes "
            f"{actor.num_nodes} and --ref.num_gpus_per_node {actor.num_gpus_per_node}"
        )
    ranks = ref.num_nodes * ref.num_gpus_per_node
    block = math.lcm(
        layout.ranks_per_data_shard,
        layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.expert_model_parallel_size,
    )
    # With more data shards than the actor there could be fewer batches than shards.
    if ranks % block or not 0 < ranks <= layout.world_size:
        raise ValueError(
            f"--ref.num_nodes x --ref.num_gpus_per_node = {ranks} ranks do not hold a reference model split like the "
            f"actor; use a multiple of {block}, at most {layout.world_size}, or --algo.kl.init_coef 0 (the paper's) "
            "for no reference model"
        )
    return replace(layout, world_size=ranks)


def _check_model(model: str | None, layout: ParallelLayout) -> None:
    from transformers import AutoConfig

    from gapo_megatron.megatron.families import family_of

    if model is None:
        raise ValueError(
            "--actor.model_name_or_path is missing; give a Hugging Face folder, or a name on the model hub"
        )
    try:
        hf_config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--actor.model_name_or_path {model}: the configuration cannot be read ({reason}); give a folder or hub name "
            "of a model in a supported family"
        ) from error
    family_of(hf_config)
    layout.check_model(hf_config)
