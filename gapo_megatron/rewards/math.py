"""Mathematics: 1 when a response's final answer equals the label, by math-verify, else 0.

This file is what OpenRLHF's `--reward.remote_url gapo_megatron/rewards/math.py` takes.
"""

import re
from typing import Any

import torch

from gapo_megatron.rewards.grader import Grader

SPECIAL_TOKENS = re.compile(r"<\|[^|<>]*\|>|</?s>")
_TAIL = 32  # characters; long enough to hold the mark that opens the model's turn

_grader = Grader()


def is_correct(response: str, label: str) -> bool:
    """Whether the final answer in `response` equals `label`; the answer is the last expression, a \\boxed one first.

    Raises:
        ValueError: `label` holds no mathematical expression.
    """
    return _grader.equal(SPECIAL_TOKENS.sub(" ", response), label)


def response_of(query: str, prompt: str) -> str:
    """The response in `query`, which is the prompt (of which OpenRLHF may have cut the start) and the response."""
    if query.startswith(prompt):
        return query[len(prompt) :]
    _, mark, response = query.partition(prompt[-_TAIL:])
    return response if mark else query


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    """OpenRLHF's contract (`openrlhf/utils/agent.py`), which calls it in a thread, with one sample at a time.

    Args:
        queries: decoded prompts with responses, special tokens included.
        prompts: the prompts alone.
        labels: expected answers.

    Returns:
        `rewards` and `scores`, [num_queries] float of 0 and 1; no further logs.
    """
    rewards = torch.tensor(
        [float(is_correct(response_of(q, p), label)) for q, p, label in zip(queries, prompts, labels, strict=True)]
    )
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
