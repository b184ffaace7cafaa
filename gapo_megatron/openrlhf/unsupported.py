"""Options of OpenRLHF that would be silently ignored: by the Megatron actor, and by our policy loss.

A row per option. Adding or deleting a row is the whole change when support comes or goes. Options that only tune
DeepSpeed's speed or memory and change no result have no row and no effect (`--ds.packing_samples`: rollouts are always
packed; `--ds.attn_implementation`, `--ds.overlap_comm`, `--actor.gradient_checkpointing_reentrant`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Args = Any  # OpenRLHF's nested namespace, as `openrlhf.utils.config.hierarchize` returns it


@dataclass(frozen=True)
class Unsupported:
    """One option.

    Attributes:
        flag: as the user types it.
        used: whether the command line asks for it.
        why: completes "... is not supported by X: ".
        fix: what to type instead.
    """

    flag: str
    used: Callable[[Args], bool]
    why: str
    fix: str


def refuse(args: Args, rows: tuple[Unsupported, ...], owner: str) -> None:
    """Raises ValueError for the first of `rows` that `args` asks for; `owner` is what does not support it."""
    for row in rows:
        if row.used(args):
            raise ValueError(f"{row.flag} is not supported by {owner}: {row.why}; {row.fix}")


_LEAVE_OUT = "leave it out, or use --actor.backend deepspeed"

POLICY_LOSS: tuple[Unsupported, ...] = (
    Unsupported(
        "--algo.advantage.is_correction_level",
        lambda a: a.algo.advantage.is_correction_level != "off",
        "the loss has no correction for the mismatch of trainer and vLLM yet",
        "set it to off",
    ),
)

MEGATRON: tuple[Unsupported, ...] = (
    # What the defaults of OpenRLHF ask for comes first: every user meets these.
    Unsupported(
        "--algo.advantage.estimator gae",
        lambda a: a.algo.advantage.estimator == "gae",
        "it needs a critic, and there is none",
        "use --algo.advantage.estimator dr_grpo (GAPO's), or another without a critic",
    ),
    Unsupported(
        "--reward.model_name_or_path",
        lambda a: bool(a.reward.model_name_or_path),
        "a reward model would be a DeepSpeed actor of its own",
        "serve it and give --reward.remote_url, or use a verifier (a .py file with reward_func)",
    ),
    Unsupported(
        "a command without --reward.remote_url",
        lambda a: not (a.reward.remote_url or a.train.agent_func_path),
        "rewards come from a function or a server",
        "give --reward.remote_url a .py file with reward_func, or a URL; or give --train.agent_func_path",
    ),
    Unsupported(
        "a command without --vllm.num_engines",
        lambda a: not a.vllm.num_engines,
        "rollouts come from vLLM",
        "give --vllm.num_engines 1 or more",
    ),
    # Parallelism and memory: Megatron has its own.
    Unsupported(
        "--ds.tensor_parallel_size",
        lambda a: a.ds.tensor_parallel_size > 1,
        "it splits DeepSpeed's model",
        "use --megatron.tensor_model_parallel_size",
    ),
    Unsupported(
        "--ds.ring_attn_size",
        lambda a: a.ds.ring_attn_size > 1,
        "context parallelism is not there yet",
        "leave it out, and shorten --data.max_len or raise --megatron.tensor_model_parallel_size if memory is short",
    ),
    Unsupported(
        "--ds.zero_stage 3",
        lambda a: a.ds.zero_stage == 3,
        "optimizer states are always sharded over data-parallel ranks, parameters by model parallelism",
        "leave it out, and raise --megatron.tensor_model_parallel_size or --megatron.pipeline_model_parallel_size",
    ),
    Unsupported("--ds.zpg", lambda a: a.ds.zpg > 1, "it is an option of ZeRO stage 3", _LEAVE_OUT),
    Unsupported("--ref.offload", lambda a: a.ref.offload, "the reference model stays on its devices", "leave it out"),
    Unsupported(
        "--ds.adam_offload",
        lambda a: a.ds.adam_offload,
        # Megatron-Core 0.16.1's HybridDeviceOptimizer: KeyError without CUDA, TypeError without Transformer Engine.
        "Megatron-Core's optimizer on the host runs on CUDA with Transformer Engine only, and was never tried here",
        "leave it out, and say --ds.enable_sleep: the optimizer is on the host whenever it is not training",
    ),
    Unsupported("--ds.deepcompile", lambda a: a.ds.deepcompile, "it compiles DeepSpeed's engine", _LEAVE_OUT),
    Unsupported(
        "--ds.use_universal_ckpt",
        lambda a: a.ds.use_universal_ckpt,
        "it is a format of DeepSpeed's checkpoints",
        _LEAVE_OUT,
    ),
    Unsupported(
        "--ds.param_dtype fp16",
        lambda a: a.ds.param_dtype == "fp16",
        "there is no loss scaling",
        "use --megatron.params_dtype bf16 (the default) or fp32",
    ),
    Unsupported(
        "--ds.grad_accum_dtype",
        lambda a: a.ds.grad_accum_dtype not in (None, "fp32", "float32"),
        "gradients are always summed in fp32",
        _LEAVE_OUT,
    ),
    # The model.
    Unsupported("--ds.lora.rank", lambda a: a.ds.lora.rank > 0, "all weights are trained", _LEAVE_OUT),
    Unsupported("--ds.load_in_4bit", lambda a: a.ds.load_in_4bit, "weights are bf16 or fp32", _LEAVE_OUT),
    Unsupported(
        "--ds.use_liger_kernel", lambda a: a.ds.use_liger_kernel, "it patches transformers' layers", _LEAVE_OUT
    ),
    Unsupported(
        "--ds.experts_implementation",
        lambda a: a.ds.experts_implementation is not None,
        "there are no mixtures of experts yet",
        _LEAVE_OUT,
    ),
    Unsupported(
        "--data.max_images_per_prompt", lambda a: a.data.max_images_per_prompt > 0, "models read text only", _LEAVE_OUT
    ),
    Unsupported(
        "--actor.freeze_visual_encoder", lambda a: a.actor.freeze_visual_encoder, "models read text only", _LEAVE_OUT
    ),
    Unsupported("--train.enable_ema", lambda a: a.train.enable_ema, "no moving average is kept", _LEAVE_OUT),
    # The optimizer and the loss.
    Unsupported("--actor.optim muon", lambda a: a.actor.optim == "muon", "AdamW is the optimizer", "use adam"),
    Unsupported(
        "--actor.aux_loss_coef",
        lambda a: a.actor.aux_loss_coef > 0,
        "there are no mixtures of experts yet",
        "leave it out",
    ),
    # Scheduling.
    Unsupported(
        "--rollout.max_tokens_per_gpu other than --train.max_tokens_per_gpu",
        lambda a: a.rollout.max_tokens_per_gpu not in (None, a.train.max_tokens_per_gpu),
        "the log-probs before training come from the packs of training, so that ratios start at exactly 1",
        "leave it out, and set --train.max_tokens_per_gpu",
    ),
    Unsupported("--train.async_enable", lambda a: a.train.async_enable, "rollouts are synchronous", _LEAVE_OUT),
    Unsupported(
        "--train.partial_rollout_enable",
        lambda a: a.train.partial_rollout_enable,
        "rollouts are synchronous",
        _LEAVE_OUT,
    ),
    Unsupported(
        "--vllm.sync_with_ray",
        lambda a: a.vllm.sync_with_ray,
        "weights go through vLLM's own transfer engines",
        "leave it out",
    ),
)
