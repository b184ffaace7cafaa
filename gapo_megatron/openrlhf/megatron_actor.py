"""The policy in OpenRLHF's Ray group, on Megatron-Core: the role of `PolicyModelActor`."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import BaseModelActor
from openrlhf.utils import get_tokenizer
from tqdm import tqdm

from gapo_megatron.megatron import checkpoint, runtime
from gapo_megatron.megatron.batch import Rollout
from gapo_megatron.megatron.engine import PolicyEngine
from gapo_megatron.megatron.weights import hf_folder
from gapo_megatron.openrlhf.engine_config import engine_config
from gapo_megatron.openrlhf.rollouts import (
    mini_batches,
    padded_log_probs,
    rollouts_of_batch,
    rollouts_of_experience,
)
from gapo_megatron.openrlhf.sleep import SleepMixin
from gapo_megatron.openrlhf.status import Status
from gapo_megatron.sync.backend import transfer_backend
from gapo_megatron.sync.megatron_source import megatron_source
from gapo_megatron.sync.weight_sync import WeightSync

HF_SHARD_BYTES = 4 << 30


class MegatronPolicyActor(SleepMixin, BaseModelActor):
    """One rank. OpenRLHF sends the ranks of one model-parallel block the same data and keeps the first one's answer."""

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int, vllm_engines: list | None
    ) -> None:
        """Build the engine, resume from a checkpoint if asked to, and join the vLLM engines for weight transfer."""
        self.strategy, self.args = strategy, strategy.args
        # One visible GPU per Ray actor, or all of them where Ray is told not to hide any.
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        runtime.initialize(self.args.megatron_layout, self.args.megatron.distributed_timeout_minutes)
        torch.manual_seed(self.args.train.seed)
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

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list[Any]:
        """OpenRLHF's entry for batched calls. All micro-batches of `forward` go through one pipeline schedule."""
        data = {name: values[start_idx:end_idx] for name, values in all_data.items()}
        if method_name == "forward":
            return self.forward(**data)
        return [self.append(experience) for experience in data["experience"]]

    def forward(
        self,
        sequences: list[torch.Tensor],
        action_mask: list[torch.Tensor],
        attention_mask: list[torch.Tensor],
        mm_train_inputs_list: list | None = None,
    ) -> list[torch.Tensor]:
        """Log-probs of the policy that generated the rollouts: for each batch [batch, length - 1] on the CPU.

        `mm_train_inputs_list` holds nothing for text, the only input that `arguments.resolve` lets through.
        """
        batches = [rollouts_of_batch(*batch) for batch in zip(sequences, action_mask, attention_mask, strict=True)]
        rollouts = [rollout for batch in batches for rollout in batch]
        log_probs: list[torch.Tensor] = []
        with self.awake("parameters"):
            for part in self._progress(self._mini_batches(rollouts), "old log-probs"):
                log_probs += self.engine.log_probs(rollouts[part])
        values = iter(log_probs)
        return [
            padded_log_probs([next(values) for _ in batch], mask)
            for batch, mask in zip(batches, action_mask, strict=True)
        ]

    def append(self, experience: Experience) -> None:
        """Keep a batch of experience for the next `fit`."""
        self.status.add(experience)
        self.rollouts += rollouts_of_experience(experience, self.args.policy_loss_config)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        """Train on what was appended; the metrics of the whole step, the same on every rank."""
        start = time.perf_counter()
        parts = self._mini_batches(self.rollouts)
        for epoch in range(self.args.train.max_epochs):
            for part in self._progress(parts, f"train epoch {epoch + 1}/{self.args.train.max_epochs}"):
                self.status.add_step(self.engine.train_step(self.rollouts[part]))
        self.rollouts.clear()
        return {
            **self.status.reduce(self.engine.groups.dp_cp),
            "weight_version": float(self.weight_version),
            "timing/actor_train": time.perf_counter() - start,
        }

    def _mini_batches(self, rollouts: list[Rollout]) -> list[slice]:
        """This rank's share of each optimizer step; as many steps on every data-parallel rank."""
        fewest = torch.tensor(len(rollouts), device=runtime.device())
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.engine.groups.dp_cp)
        share = max(1, self.args.train.batch_size // self.args.megatron_layout.data_parallel_size)
        return mini_batches(len(rollouts), max(1, int(fewest) // share))

    def _progress(self, parts: list[slice], what: str):
        return tqdm(parts, desc=what, disable=dist.get_rank() != 0)

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
