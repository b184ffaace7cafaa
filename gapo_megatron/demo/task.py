"""The demo's task: small additions and subtractions from reasoning-gym, as training and held-out prompts."""

import json
import random
from pathlib import Path

INSTRUCTION = "Answer with the number only."
HELD_OUT = 64
DIGITS = 1


def problems(seed: int, size: int = 4000) -> list[tuple[str, str]]:
    """(question, answer) of every different problem whose answer is not negative, in an order that `seed` decides."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=size,
        seed=seed,
        operators=("+", "-"),
        min_terms=2,
        max_terms=2,
        min_digits=DIGITS,
        max_digits=DIGITS,
        allow_parentheses=False,
        allow_negation=False,
        format_style="simple",
    )
    different = {row["question"]: row["answer"] for row in dataset if not row["answer"].startswith("-")}
    ordered = sorted(different.items())
    random.Random(seed).shuffle(ordered)
    return ordered


def row(question: str, answer: str) -> dict[str, str]:
    """A line of a file for OpenRLHF's `--data.prompt_dataset` (`--data.input_key input --data.label_key label`)."""
    return {"input": f"{question} {INSTRUCTION}", "label": answer}


def write_task(folder: Path, seed: int, train_size: int, held_out_size: int = HELD_OUT) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl`, which share no question; returns both paths.

    The held-out questions are the same for every seed, so that runs can be compared. `seed` orders the training ones, of
    which there are about 120; beyond that they repeat, pass by pass.
    """
    every = problems(seed=0)
    held_out, pool = every[:HELD_OUT], every[HELD_OUT:]
    rng = random.Random(seed)
    train = []
    while len(train) < train_size:
        train += rng.sample(pool, min(len(pool), train_size - len(train)))
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, part in zip(paths, (train, held_out[:held_out_size]), strict=True):
        path.write_text("".join(json.dumps(row(*problem)) + "\n" for problem in part))
    return paths
