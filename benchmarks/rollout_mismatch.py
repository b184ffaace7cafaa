"""How far vLLM's log-probs are from the trainer's, after real weights have travelled.

A Megatron policy of two ranks (PP2) takes one optimizer step and sends its weights to a vLLM engine. Then the same
sequences are scored four ways:

- the Megatron policy itself;
- the vLLM engine that received the weights;
- a vLLM engine started afresh from the folder that the policy saved;
- transformers from that folder.

    python benchmarks/rollout_mismatch.py --model MODEL_FOLDER --output mismatch.json

Needs a Ray with four (schedulable) GPUs in RAY_ADDRESS, or starts a private one. bf16; about two minutes on two cores.
"""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import ray
import torch

from gapo_megatron.demo.one_engine import start_engine

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "To add 27 and 35, add the tens and the ones: 20 + 30 = 50 and 7 + 5 = 12, so the sum is 62.",
    "def double(x):\n    return 2 * x\n",
    "Once upon a time, a small robot learned to count. One, two, three, it said, and smiled.",
)


def arguments(model: str, output: Path) -> SimpleNamespace:
    """OpenRLHF's arguments as far as the Megatron actor reads them."""
    from openrlhf.utils.config import hierarchize

    from gapo_megatron.loss.config import PolicyLossConfig
    from gapo_megatron.megatron.layout import ParallelLayout

    return hierarchize(
        SimpleNamespace(
            **{
                "actor.adam.lr": 1e-5,
                "actor.adam.betas": (0.9, 0.95),
                "actor.adam.eps": 1e-8,
                "actor.adam.weight_decay": 0.0,
                "actor.max_norm": 1.0,
                "actor.lr_scheduler": "constant",
                "actor.lr_warmup_ratio": 0.0,
                "actor.min_lr_ratio": 0.1,
                "actor.gradient_checkpointing_enable": False,
                "actor.entropy_coef": None,
                "algo.kl.init_coef": 0.0,
                "algo.kl.use_loss": False,
                "actor.model_name_or_path": model,
                "rollout.temperature": 1.0,
                "train.max_tokens_per_gpu": 1024,
                "train.batch_size": 64,
                "train.max_epochs": 1,
                "train.seed": 42,
                "train.colocate_all": False,
                "ds.enable_sleep": False,
                "data.disable_fast_tokenizer": False,
                "ckpt.load_enable": False,
                "ckpt.path": str(output / "checkpoints"),
                "ckpt.output_dir": str(output / "model"),
                "vllm.tensor_parallel_size": 1,
                "megatron.params_dtype": "bf16",
                "megatron.recompute_granularity": None,
                "megatron.recompute_modules": None,
                "megatron.distributed_timeout_minutes": 5.0,
                "megatron.sync_bucket_mb": 64,
                "policy_loss_config": PolicyLossConfig(),
                "megatron_layout": ParallelLayout(2, pipeline_model_parallel_size=2),
            }
        )
    )


def vllm_log_probs(engine, sequences: list[list[int]]) -> list[torch.Tensor]:
    """log p(token t + 1 | tokens up to t) of each sequence, from a vLLM engine."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
    # One at a time: how requests share a batch changes the rounding.
    outputs = [ray.get(engine.generate.remote(tokens, parameters)) for tokens in sequences]
    return [
        torch.tensor(
            [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
        )
        for tokens, output in zip(sequences, outputs, strict=True)
    ]


def transformers_log_probs(folder: str, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The same from transformers, in bf16 with fp32 softmax."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    result = []
    for tokens in map(torch.tensor, sequences):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float()
        result.append(logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1))
    return result


class Policy:
    """Two Megatron ranks in OpenRLHF's Ray group."""

    def __init__(self, args, engine, model: str) -> None:
        from openrlhf.trainer.ray.launcher import RayActorGroup

        from gapo_megatron.openrlhf.megatron_actor import MegatronPolicyActor

        self.group = RayActorGroup(1, 2, ray.remote(num_gpus=1)(MegatronPolicyActor), duplicate_actors=2)
        strategy = SimpleNamespace(args=args)
        ray.get(self.group.async_init_model_from_pretrained(strategy, model, 10, [engine]))

    def log_probs(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Of every token but the first."""
        batches = [torch.tensor([tokens]) for tokens in sequences]
        ones = [torch.ones_like(batch) for batch in batches]
        forward = dict(sequences=batches, action_mask=[o[:, 1:] for o in ones], attention_mask=ones)
        results = ray.get(self.group.async_run_method_batch("forward", **forward))[0]
        return [row[0] for row in results]

    def train(self, sequences: list[list[int]], log_probs: list[torch.Tensor]) -> None:
        """One step that makes the first half of the sequences likelier than the second."""
        from openrlhf.trainer.ppo_utils.experience import Experience

        half = len(sequences) // 2
        experiences = []
        for i, (tokens, old) in enumerate(zip(sequences, log_probs, strict=True)):
            sequence, correct = torch.tensor([tokens]), float(i < half)
            info = dict(correct=[correct], group_correct=[float(half)], group_size=[float(len(sequences))])
            experiences.append(
                Experience(
                    sequences=sequence,
                    attention_mask=torch.ones_like(sequence),
                    action_mask=torch.ones_like(sequence[:, 1:]),
                    action_log_probs=old[None],
                    advantages=torch.full_like(old[None], correct - half / len(sequences)),
                    info={key: torch.tensor(value) for key, value in info.items()},
                )
            )
        ray.get(self.group.async_run_method_batch("append", experience=experiences))
        ray.get(self.group.async_run_method("fit"))
        ray.get(self.group.async_run_method("broadcast_to_vllm"))
        ray.get(self.group.async_save_model())


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> dict[str, float]:
    """Mean and largest absolute difference over all tokens."""
    distance = (torch.cat(a) - torch.cat(b)).abs()
    return {"mean": float(distance.mean()), "max": float(distance.max())}


def measure(model: str, output: Path) -> dict[str, dict[str, float]]:
    """All differences; Ray must be initialized."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = [tokenizer(text)["input_ids"] for text in TEXTS]
    args = arguments(model, output)
    engine = start_engine(model)
    policy = Policy(args, engine, model)
    before = policy.log_probs(sequences)
    vllm_before = vllm_log_probs(engine, sequences)
    policy.train(sequences, before)
    after, synced = policy.log_probs(sequences), vllm_log_probs(engine, sequences)
    version = ray.get(engine.weight_version.remote())
    ray.kill(engine)
    fresh = vllm_log_probs(start_engine(args.ckpt.output_dir), sequences)
    return {
        "update: policy after - before": difference(after, before),
        "before any sync: vLLM - policy": difference(vllm_before, before),
        "after a sync: vLLM - policy": difference(synced, after),
        "after a sync: vLLM - vLLM loaded afresh from the saved folder": difference(synced, fresh),
        "saved folder: transformers - policy": difference(
            transformers_log_probs(args.ckpt.output_dir, sequences), after
        ),
        "weight version": {"engine": float(version)},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a supported family")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/mismatch"), help="folder for the model and the result"
    )
    args = parser.parse_args()
    ray.init(**({} if "RAY_ADDRESS" in os.environ else {"num_gpus": 4, "num_cpus": 8}))
    args.output.mkdir(parents=True, exist_ok=True)
    result = measure(args.model, args.output)
    (args.output / "mismatch.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, values in result.items():
        print(f"{name:66s} " + "  ".join(f"{k} {v:.3g}" for k, v in values.items()))


if __name__ == "__main__":
    main()
