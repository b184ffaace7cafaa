"""`gapo demo`: evaluate SmolLM2-135M, train it with OpenRLHF, GAPO and a Megatron actor, evaluate again."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gapo_megatron.demo.model import prepare_model
from gapo_megatron.demo.private_ray import private_ray, stop_session
from gapo_megatron.demo.report import print_summary, summarize, write_figure
from gapo_megatron.demo.task import HELD_OUT, write_task
from gapo_megatron.openrlhf.patching import require_patched

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "demo_cpu.sh"
PROMPTS_PER_STEP = 8  # --rollout.batch_size in the script
MAX_NEW_TOKENS = 16  # --rollout.max_new_tokens in the script
SAMPLES = 8
STEPS = 12
STEP_LINE = re.compile(r"\[train (\d+)\].*")

console = Console()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `gapo demo`."""
    parser.add_argument("--output_dir", default="runs/demo", metavar="DIR", help="default runs/demo")
    parser.add_argument("--seed", type=int, default=42, help="default 42")
    parser.add_argument("--steps", type=int, help=f"rollout batches of 8 prompts x 8 rollouts (default {STEPS})")
    parser.add_argument(
        "--backend", choices=("megatron", "deepspeed"), default="megatron", help="the actor (default megatron)"
    )
    parser.add_argument("--short", action="store_true", help="2 steps and 16 held-out prompts: does everything work?")


def run(args: argparse.Namespace) -> int:
    """Prepare, evaluate, train, evaluate, report."""
    if not SCRIPT.is_file():
        raise ValueError("gapo demo needs the repository's examples/scripts; run it from a checkout (pip install -e .)")
    require_patched()
    steps = args.steps or (2 if args.short else STEPS)
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, not {steps}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Ray is stopped
    started = time.monotonic()
    output = Path(args.output_dir).resolve()
    if (output / "model" / "metrics.jsonl").exists():
        raise ValueError(f"--output_dir {output} holds another run; name a new folder, or remove that one")
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    with console.status("writing the model and the task"):
        model = prepare_model(output.parent / "models" / "smollm2-135m-instruct")
        train, held_out = write_task(
            output / "data", args.seed, steps * PROMPTS_PER_STEP, 16 if args.short else HELD_OUT
        )
    before = evaluate(model, held_out, args.seed, output / "before.json", logs / "evaluate_before.log")
    with private_ray(num_gpus=3, num_cpus=7, log=logs / "ray.log") as address:
        environment = {
            **os.environ,
            "RAY_ADDRESS": address,
            **{"MODEL": str(model), "DATA": str(train), "OUTPUT": str(output), "SEED": str(args.seed)},
            **{"BACKEND": args.backend, "PYTHON": sys.executable},
        }
        train_steps(environment, steps, logs / "train.log")
    after = evaluate(output / "model", held_out, args.seed, output / "after.json", logs / "evaluate_after.log")

    metrics = [json.loads(line) for line in (output / "model" / "metrics.jsonl").read_text().splitlines()]
    summary = summarize(before, after, metrics, args.backend, args.seed, time.monotonic() - started)
    (output / "summary.json").write_text(json.dumps(summary, indent=1))
    write_figure(summary, output / "summary.png")
    print_summary(summary, console)
    console.print(f"written to {output}: summary.json, summary.png, model/ (Hugging Face folder), logs/")
    return 0


def evaluate(model: Path, data: Path, seed: int, output: Path, log: Path) -> dict:
    """`gapo evaluate` in a process of its own, so that its memory is free again afterwards."""
    command = [
        *(sys.executable, "-m", "gapo_megatron.cli", "evaluate", "--model", str(model), "--data", str(data)),
        *("--n", str(SAMPLES), "--k", "1", "2", "4", "8", "--temperature", "1.0"),
        *("--max_new_tokens", str(MAX_NEW_TOKENS), "--seed", str(seed), "--output", str(output)),
    ]
    with console.status(f"evaluating {model.name} on held-out prompts (pass@1 to pass@8)"), log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait()
        finally:
            stop_session(process)
    if code:
        raise ValueError(_failure("the evaluation", code, log))
    result = json.loads(output.read_text())
    one = result["pass_at_k"]["pass@1"]
    console.print(f"{output.stem}: pass@1 {one['mean']:.3f} ({one['low']:.3f} to {one['high']:.3f})")
    return result


def train_steps(environment: dict[str, str], steps: int, log: Path) -> None:
    """OpenRLHF's command, its whole output in `log`, a line for every step on the terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with log.open("w") as file, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting vLLM and two trainer ranks (a minute or two)", total=steps)
        process = subprocess.Popen(
            ["bash", str(SCRIPT)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if match := STEP_LINE.search(line):
                    progress.console.print(match[0], markup=False, highlight=False, soft_wrap=True)
                    progress.update(bar, completed=int(match[1]), description="training")
            code = process.wait()
        finally:
            stop_session(process)
    if code:
        raise ValueError(_failure("training", code, log))


def _failure(what: str, code: int, log: Path) -> str:
    """One line: the last error in the log, and where to read more."""
    with log.open(errors="replace") as file:
        last = deque((line.strip() for line in file if re.search(r"\b\w*(Error|error:)", line)), maxlen=1)
    return f"{what} ended with exit code {code}{': ' + last[0][-300:] if last else ''}; the whole log is {log}"
