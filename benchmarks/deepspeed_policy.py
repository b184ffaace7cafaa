"""OpenRLHF's own DeepSpeed actor in this process: what its `PolicyModelActor` does, without Ray around it."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.config import hierarchize
from openrlhf.utils.deepspeed import DeepspeedStrategy

from gapo_megatron.loss.config import PolicyLossConfig


def arguments(loss: PolicyLossConfig, lr: float) -> Any:
    """OpenRLHF's arguments as far as its actor reads them: bf16, ZeRO-2, attention by SDPA, padded micro-batches."""
    values = {
        "local_rank": -1,
        "policy_loss_config": loss,
        "actor.optim": "adam",
        "actor.muon.lr": 0.0,
        "actor.adam.lr": lr,
        "actor.adam.betas": (0.9, 0.95),
        "actor.adam.eps": 1e-8,
        "actor.adam.weight_decay": 0.0,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0.0,
        "actor.min_lr_ratio": 0.1,
        "actor.max_norm": 1.0,
        "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": (0.2, 0.2),
        "actor.dual_clip": None,
        "actor.loss_agg_mode": "token-mean",
        "actor.policy_loss_type": "ppo",
        "actor.aux_loss_coef": 0.0,
        "actor.entropy_coef": None,
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.advantage.is_correction_threshold": (0.5, 5.0),
        "algo.kl.use_loss": False,
        "algo.kl.init_coef": 0.0,
        "ds.param_dtype": "bf16",
        "ds.zero_stage": 2,
        "ds.tensor_parallel_size": 1,
        "ds.packing_samples": False,
        "train.max_epochs": 1,
        "train.dynamic_batch_enable": False,
        "train.colocate_all": False,
        "train.async_enable": False,
        "vllm.sync_backend": "gloo",
    }
    return hierarchize(SimpleNamespace(**values))


class DeepSpeedPolicy:
    """A process group must exist already; DS_ACCELERATOR=cpu where there is no GPU."""

    def __init__(self, model: str, batch_size: int, micro_batch_size: int, loss: PolicyLossConfig, lr: float) -> None:
        args = arguments(loss, lr)
        strategy = DeepspeedStrategy(
            max_norm=1.0, train_batch_size=batch_size, micro_train_batch_size=micro_batch_size, zero_stage=2, args=args
        )
        strategy.setup_distributed()
        actor = Actor(model, attn_implementation="sdpa", ds_config=strategy.get_ds_train_config())
        settings = {name: getattr(args.actor, name) for name in ("optim", "lr_scheduler", "lr_warmup_ratio")}
        settings |= dict(muon=vars(args.actor.muon), adam=vars(args.actor.adam), max_norm=1.0, scheduler_steps=1000)
        actor, optimizer, scheduler = strategy.prepare((actor, settings))
        self.trainer = ActorPPOTrainer(
            strategy,
            actor,
            ema_model=None,
            actor_optim=optimizer,
            actor_scheduler=scheduler,
            micro_train_batch_size=micro_batch_size,
            dataloader_pin_memory=torch.cuda.is_available(),
            vllm_engines=None,
        )
        actor.train()

    def train_step(self, experience: Experience) -> dict[str, float]:
        """One optimizer step on `experience`, whose samples the replay buffer shuffles into padded micro-batches."""
        self.trainer.replay_buffer.append(experience)
        status = self.trainer.ppo_train(kl_ctl=0.0)
        self.trainer.replay_buffer.clear()
        assert math.isfinite(status["policy_loss"])
        return status
