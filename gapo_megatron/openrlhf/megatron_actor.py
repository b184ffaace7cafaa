"""The policy in OpenRLHF's Ray group, on Megatron-Core: the role of `PolicyModelActor`."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import get_tokenizer

from gapo_megatron.megatron import checkpoint
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.engine import PolicyEngine
from gapo_megatron.megatron.weights import hf_folder
from gapo_megatron.openrlhf.engine_config import engine_config
from gapo_megatron.openrlhf.megatron_model_actor import MegatronModelActor
from gapo_megatron.openrlhf.rollouts import rollouts_of_experience
from gapo_megatron.openrlhf.sleep import SleepMixin
from gapo_megatron.openrlhf.status import Status
from gapo_megatron.sync.backend import transfer_backend
from gapo_megatron.sync.megatron_source import megatron_source
from gapo_megatron.sync.weight_sync import WeightSync

HF_SHARD_BYTES = 4 << 30


class MegatronPolicyActor(SleepMixin, MegatronModelActor):
    """One rank of the policy."""

    engine: PolicyEngine

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int, vllm_engines: list | None
    ) -> None:
        """Build the engine, resume from a checkpoint if asked to, and join the vLLM engines for weight transfer."""
        self.join(strategy, strategy.args.megatron_layout)
        self.engine = PolicyEngine(pretrain, engine_config(self.args, max_steps))
        self.tokenizer = get_tokenizer(
            pretrain, None, "left", strategy, use_fast=not self.args.data.disable_fast_tokenizer
        )
        self.rollouts: list[Rollout] = []
        self.status = Status()
        self.checkpoint_states: dict[str, Any] = {}
        self.checkpoint_folder = os.path.join(self.args.ckpt.path, "_actor")
        if self.args.ckpt.load_enable and os.path.exists(self.checkpoint_folder):
            self.checkpoint_states = checkpoint.load(self.engine, self.checkpoint_folder)
        self.weight_version = self.checkpoint_states.get("weight_version", 0)
        self.sync = self._join_vllm(vllm_engines) if vllm_engines else None
        if self.args.ds.enable_sleep:
            self.offload_states()

    def _join_vllm(self, vllm_engines: list) -> WeightSync:
        backend = transfer_backend(self.args.train.colocate_all)
        return WeightSync(
            source=megatron_source(self.engine.weights, backend),
            engines=vllm_engines,
            rank=dist.get_rank(),
            workers_per_engine=self.args.vllm.tensor_parallel_size,
            bucket_mb=self.args.megatron.sync_bucket_mb,
            timeout_seconds=60 * self.args.megatron.distributed_timeout_minutes,
            backend=backend,
        )

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """log pi_old of the rollouts, in the packs that training will meet; see `MegatronModelActor.forward`."""
        with self.awake("parameters"):
            return super().forward(*args, **kwargs)

    def append(self, experience: Experience) -> None:
        """Keep a batch of experience for the next `fit`."""
        self.status.add(experience)
        self.rollouts += rollouts_of_experience(experience, self.args.policy_loss_config)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        """Train on what was appended; the metrics of the whole step, the same on every rank.

        `kl_ctl` is the coefficient of a KL term in the loss; a KL in the reward is part of the advantages already.
        """
        start = time.perf_counter()
        parts = self.mini_batches(self.rollouts)
        for epoch in range(self.args.train.max_epochs):
            for part in self.progress(parts, f"train epoch {epoch + 1}/{self.args.train.max_epochs}"):
                self.status.add_step(self.engine.train_step(self.rollouts[part], kl_ctl))
        self.rollouts.clear()
        return {
            **self.status.reduce(self.engine.groups.dp_cp),
            "weight_version": float(self.weight_version),
            "timing/actor_train": time.perf_counter() - start,
        }

    def broadcast_to_vllm(self) -> None:
        """Send the weights to every vLLM engine under the next version number."""
        assert self.sync is not None
        self.weight_version += 1
        with self.awake("parameters"):
            self.sync.send(self.weight_version)

    def save_model(self) -> None:
        """Write `--ckpt.output_dir` as a Hugging Face folder."""
        self._save_hf(self.args.ckpt.output_dir)

    def save_checkpoint(self, tag: str, client_states: dict | None = None, metric_value=None, metric_key=None) -> None:
        """Write a whole checkpoint of weights, optimizer and schedule, and a Hugging Face folder if asked to."""
        if not self.args.ckpt.disable_ds:
            states = {**(client_states or {}), "weight_version": self.weight_version}
            with self.awake("parameters", "optimizer"):
                checkpoint.save(self.engine, self.checkpoint_folder, tag, states, self.args.ckpt.max_num)
        if self.args.ckpt.save_hf:
            self._save_hf(os.path.join(self.args.ckpt.path, f"{tag}_hf"))

    def _save_hf(self, folder: str) -> None:
        with self.awake("parameters"):
            if dist.get_rank() == 0:
                hf_folder.write(folder, self.engine.weights, self.engine.hf_config, self.tokenizer, HF_SHARD_BYTES)
            else:
                for _ in self.engine.weights:
                    pass
        dist.barrier()

    def get_checkpoint_states(self) -> dict[str, Any]:
        """The client state of the checkpoint that was loaded."""
        return self.checkpoint_states
