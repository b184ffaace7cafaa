"""Our options on OpenRLHF's command line, and what they resolve to."""

import argparse
from dataclasses import dataclass
from typing import Any, get_args

from gapo_megatron.loss.config import Aggregation, ClipSchedule, ImportanceLevel, PolicyLossConfig
from gapo_megatron.megatron.layout import ParallelLayout
from gapo_megatron.megatron.recompute import Granularity, Module
from gapo_megatron.openrlhf import colocation, patching, unsupported
from gapo_megatron.openrlhf.dataset import check_columns
from gapo_megatron.openrlhf.layouts import actor_layout, reference_layout

LOSS_FLAGS = ("eps_lo", "eps_hi_max", "importance_level", "clip_schedule", "correct_threshold")
MEGATRON_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "params_dtype": "bf16",
    "recompute_granularity": None,
    "recompute_modules": None,
    "distributed_timeout_minutes": 10.0,
    "sync_bucket_mb": 256,
}


@dataclass(frozen=True)
class LossPreset:
    """What a `--policy_loss` stands for when our code computes it.

    Attributes:
        importance_level, clip_schedule: defaults; fixed for ppo and gspo, which would be another loss otherwise.
        aggregation: a fixed one, or None to follow `--actor.loss_agg_mode`.
    """

    importance_level: ImportanceLevel
    clip_schedule: ClipSchedule
    aggregation: Aggregation | None = None


PRESETS: dict[str, LossPreset] = {
    "gapo": LossPreset("sequence", "linear"),
    "gspo": LossPreset("sequence", "fixed", "seq-mean-token-mean"),  # as OpenRLHF forces it
    "ppo": LossPreset("token", "fixed"),
}
GAPO_WIDTHS: dict[str, tuple[float, float]] = {"sequence": (3e-3, 5e-3), "token": (0.2, 0.28)}  # the paper's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the policy loss and the Megatron backend to OpenRLHF's parser (`openrlhf.cli.train_ppo_ray`)."""
    theirs = next(a for a in parser._actions if a.dest == "actor.policy_loss_type")
    theirs.choices = list(PRESETS)
    theirs.default = None  # so that `resolve` can tell a policy loss that was named from the default, ppo
    _add_loss_arguments(parser.add_argument_group("policy loss (GAPO)"), theirs)
    _add_megatron_arguments(parser.add_argument_group("Megatron-Core actor"))


def _add_loss_arguments(group: Any, theirs: argparse.Action) -> None:
    group.add_argument(
        "--policy_loss",
        dest=theirs.dest,
        default=argparse.SUPPRESS,
        choices=theirs.choices,
        help="Same as --actor.policy_loss_type (default ppo). gapo clips a correct rollout the later, the rarer correct "
        "rollouts are in its group: 1 + eps_hi_max when it is the only one, 1 + eps_lo when all are correct. It needs "
        "--algo.advantage.estimator dr_grpo and --rollout.n_samples_per_prompt above 1 (paper: 8). GSPO with a mean "
        "over tokens is gapo with --clip_schedule fixed.",
    )
    group.add_argument(
        "--eps_lo",
        type=float,
        help="Lower clip width, and the upper one of the most common correct rollouts. Default 3e-3, with "
        "--importance_level token 0.2. Paper: 3e-3 for Qwen2.5-Math-1.5B and Llama-3.2-3B, 7e-5 for R1-distilled models.",
    )
    group.add_argument(
        "--eps_hi_max",
        type=float,
        help="Upper clip width of the rarest correct rollouts. Default 5e-3, with --importance_level token 0.28. "
        "Paper: 5e-3 for Qwen2.5-Math-1.5B and Llama-3.2-3B, 3e-4 for R1-distilled models.",
    )
    group.add_argument(
        "--importance_level",
        choices=get_args(ImportanceLevel),
        help="Ratio that is clipped: of the whole sequence (its geometric mean over tokens) or of each token. Default "
        "sequence for gapo and gspo, token for ppo. Paper: sequence for mathematics, token for code.",
    )
    group.add_argument(
        "--clip_schedule",
        choices=get_args(ClipSchedule),
        help="How the upper width grows from eps_lo to eps_hi_max: linear in the advantage (eq. 11; default for gapo), "
        "exponential (eq. 9, exact), or fixed at eps_hi_max for every rollout (default for ppo and gspo).",
    )
    group.add_argument(
        "--correct_threshold",
        type=float,
        help="A rollout counts as correct when its verifier's reward is at least this. Default 0.5 (rewards 0 and 1).",
    )


def _add_megatron_arguments(group: Any) -> None:
    group.add_argument(
        "--actor.backend",
        choices=("deepspeed", "megatron"),
        default="deepspeed",
        help="What trains the policy. megatron splits one model over many devices; the rest of the command stays. "
        "Default deepspeed.",
    )

    def add(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(f"--megatron.{name}", default=MEGATRON_DEFAULTS[name], help=help, **kwargs)

    add(
        "tensor_model_parallel_size",
        "Ranks that split every layer; must divide attention heads and MLP channels, and divide the key-value heads or be "
        "a multiple of them. Keep it within one node. Default 1; 7B models commonly use 2 to 4.",
        type=int,
    )
    add(
        "pipeline_model_parallel_size",
        "Stages that split the layers, also unevenly (30 layers over 4: 8, 8, 7, 7). Default 1; for models that do not "
        "fit one node.",
        type=int,
    )
    add(
        "virtual_pipeline_model_parallel_size",
        "Chunks of layers on each pipeline stage: the interleaved schedule, with a smaller bubble and more messages. "
        "Default 1.",
        type=int,
    )
    add(
        "context_parallel_size",
        "Ranks that split every sequence, for long responses: each holds 1/CP of a sequence's activations. Default 1.",
        type=int,
    )
    add(
        "expert_model_parallel_size",
        "Ranks that split the experts of a mixture of experts, taken from the context- and data-parallel ranks. Default 1.",
        type=int,
    )
    add(
        "sequence_parallel",
        "Split norms and residuals over the tensor-parallel ranks too: less activation memory, same result. Default off.",
        action="store_true",
    )
    add(
        "params_dtype",
        "Weights and activations; masters, gradient sums and ratios are fp32 or better. Default bf16; fp32 for tests.",
        choices=("bf16", "fp32"),
    )
    add(
        "recompute_granularity",
        "Compute activations again in the backward pass instead of keeping them: full (whole layers, the least memory; same "
        "as --actor.gradient_checkpointing_enable) or selective (--megatron.recompute_modules). Same result. Default: none.",
        choices=get_args(Granularity),
    )
    add(
        "recompute_modules",
        "What selective recompute covers: core_attn, attention without its projections, and mlp, which holds most of a "
        "layer's activations. Default core_attn.",
        nargs="+",
        choices=get_args(Module),
    )
    add(
        "distributed_timeout_minutes",
        "A collective that waits longer than this fails, instead of hanging. Default 10.",
        type=float,
    )
    add("sync_bucket_mb", "Weights travel to vLLM in buckets of this many MiB. Default 256.", type=int)


def resolve(args: Any, parser: argparse.ArgumentParser) -> None:
    """Validate OpenRLHF's nested namespace and set what the other seams read.

    Sets `args.policy_loss_config` (`PolicyLossConfig`, or None for OpenRLHF's own loss, untouched),
    `args.megatron_layout` (`ParallelLayout`, or None for DeepSpeed), `args.reference_layout` (or None without a reference
    model on Megatron) and `args.balance_ranks` (see `balance`). With Megatron, `args.ds.tensor_parallel_size *
    args.ds.ring_attn_size` becomes the number of ranks that share one data shard, because OpenRLHF reads it as that, and
    `--train.dynamic_batch_enable` goes from OpenRLHF to us.
    A user error is one sentence on stderr and exit code 2.
    """
    try:
        patching.require_version(patching.find_installation())
        args.policy_loss_config = _policy_loss_config(args)
        args.megatron_layout = _megatron_layout(args)
        args.reference_layout = reference_layout(args)
        if args.policy_loss_config is not None:
            check_columns(args)
        if args.megatron_layout is not None:
            from gapo_megatron.openrlhf.engine_config import engine_config

            engine_config(args, max_steps=1)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    args.balance_ranks = args.megatron_layout is not None and args.train.dynamic_batch_enable
    if args.megatron_layout is not None:
        args.ds.tensor_parallel_size = args.megatron_layout.ranks_per_data_shard
        args.ds.ring_attn_size = 1
        args.train.dynamic_batch_enable = False


def _policy_loss_config(args: Any) -> PolicyLossConfig | None:
    """The configuration of our loss, or None when the command line does not ask for it."""
    given = [f"--{flag}" for flag in LOSS_FLAGS if getattr(args, flag) is not None]
    if given and args.actor.policy_loss_type is None:
        raise ValueError(f"{given[0]} is an option of a policy loss that is named; add --policy_loss gapo")
    name = args.actor.policy_loss_type = args.actor.policy_loss_type or "ppo"
    if name == "gapo":
        _check_gapo(args)
    elif not given and args.actor.backend == "deepspeed":
        return None
    unsupported.refuse(args, unsupported.POLICY_LOSS, f"--policy_loss {name} in gapo_megatron")

    preset = PRESETS[name]
    for flag in ("importance_level", "clip_schedule"):
        value, fixed = getattr(args, flag), getattr(preset, flag)
        if name != "gapo" and value not in (None, fixed):
            raise ValueError(
                f"--{flag} {value} contradicts --policy_loss {name}, whose {flag} is {fixed}; "
                f"leave it out, or use --policy_loss gapo"
            )
    level = _first(args.importance_level, preset.importance_level)
    eps_lo, eps_hi_max = GAPO_WIDTHS[level] if name == "gapo" else _openrlhf_widths(args)
    return PolicyLossConfig(
        importance_level=level,
        eps_lo=_first(args.eps_lo, eps_lo),
        eps_hi_max=_first(args.eps_hi_max, eps_hi_max),
        clip_schedule=_first(args.clip_schedule, preset.clip_schedule),
        aggregation=_first(preset.aggregation, args.actor.loss_agg_mode),
        dual_clip=args.actor.dual_clip,
        correct_threshold=_first(args.correct_threshold, PolicyLossConfig.correct_threshold),
    )


def _check_gapo(args: Any) -> None:
    if args.rollout.n_samples_per_prompt < 2:
        raise ValueError(
            "--policy_loss gapo compares the rollouts of one prompt; "
            "set --rollout.n_samples_per_prompt to at least 2 (the paper uses 8)"
        )
    if args.algo.advantage.estimator != "dr_grpo":
        raise ValueError(
            f"--policy_loss gapo needs advantages that are not divided by a standard deviation (eq. 2), not "
            f"{args.algo.advantage.estimator}; use --algo.advantage.estimator dr_grpo"
        )
    if args.actor.eps_clip_low_high is not None or args.actor.eps_clip != 0.2:
        raise ValueError(
            "--policy_loss gapo does not read --actor.eps_clip or --actor.eps_clip_low_high; "
            "use --eps_lo and --eps_hi_max"
        )


def _openrlhf_widths(args: Any) -> tuple[float, float]:
    low_high = args.actor.eps_clip_low_high
    if low_high is None:
        return args.actor.eps_clip, args.actor.eps_clip
    if args.eps_lo is not None or args.eps_hi_max is not None:
        raise ValueError(
            "--actor.eps_clip_low_high and --eps_lo / --eps_hi_max both give the clip widths; leave one out"
        )
    return tuple(low_high)


def _megatron_layout(args: Any) -> ParallelLayout | None:
    """The layout of the Megatron backend, checked against the model, or None for DeepSpeed."""
    if args.actor.backend == "deepspeed":
        for name, default in MEGATRON_DEFAULTS.items():
            if getattr(args.megatron, name) != default:
                raise ValueError(f"--megatron.{name} has no effect on DeepSpeed; add --actor.backend megatron")
        return None
    unsupported.refuse(args, unsupported.MEGATRON, "--actor.backend megatron")
    colocation.check(args)
    for name in ("distributed_timeout_minutes", "sync_bucket_mb"):
        if not getattr(args.megatron, name) > 0:
            raise ValueError(f"--megatron.{name} must be above 0, not {getattr(args.megatron, name)}")
    return actor_layout(args)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((v for v in values if v is not None), None)
