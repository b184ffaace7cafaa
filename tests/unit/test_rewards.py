"""The mathematics reward: what counts as correct, OpenRLHF's contract, threads, and time limits."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

import gapo_megatron.rewards.math as math_reward
from gapo_megatron.rewards.grader import Grader

CORRECT = [
    ("7", "7"),
    ("The answer is 7.", "7"),
    ("4 + 3 = 7<|im_end|>", "7"),
    ("4 - 8 = -4", "-4"),
    (r"so the result is $\boxed{\frac{1}{2}}$", "0.5"),
    (r"\boxed{12} and not 13", "12"),
    ("1,234", "1234"),
    ("7</s>", "7"),
]
WRONG = [
    ("", "7"),
    ("seven", "7"),
    ("7 + 4 = 12", "11"),
    ("4", "-4"),
    ("The answer is 12", "1"),
    ("first 7, then 8", "7"),
]


@pytest.mark.parametrize("response, label", CORRECT)
def test_final_answer_that_equals_the_label_is_correct(response, label):
    assert math_reward.is_correct(response, label)


@pytest.mark.parametrize("response, label", WRONG)
def test_anything_else_is_wrong(response, label):
    assert not math_reward.is_correct(response, label)


def test_label_without_a_number_is_refused():
    with pytest.raises(ValueError, match="label"):
        math_reward.is_correct("7", "none")


def test_numbers_of_the_prompt_are_not_an_answer():
    prompt = "<|im_start|>user\nWhat is 3 + 4? (Hint: 7)<|im_end|>\n<|im_start|>assistant\n"
    out = math_reward.reward_func([prompt + "no idea<|im_end|>", prompt + "7<|im_end|>"], [prompt] * 2, ["7", "7"])
    assert out["rewards"].tolist() == out["scores"].tolist() == [0.0, 1.0]
    assert out["rewards"].dtype == torch.float32


def test_response_is_found_when_the_start_of_the_prompt_was_cut():
    prompt = "x" * 200 + "<|im_end|>\n<|im_start|>assistant\n"
    assert math_reward.response_of(prompt[50:] + "42", prompt) == "42"


def test_openrlhf_loads_the_file_and_scores_concurrent_samples():
    """The reference is OpenRLHF's own executor, which calls the function in threads of an event loop."""
    agent = pytest.importorskip("openrlhf.utils.agent")
    executor = agent.SingleTurnAgentExecutor([str(Path(math_reward.__file__))])

    async def score_all():
        calls = [executor._fetch_rewards_via_func([f"q{i} 5"], [f"q{i} "], [str(i)]) for i in range(16)]
        return await asyncio.gather(*calls)

    scores = [chunks[0]["rewards"] for chunks in asyncio.run(score_all())]
    assert torch.cat(scores).tolist() == [float(i == 5) for i in range(16)]


def test_expression_that_takes_hours_is_wrong_after_the_time_limit_and_grading_goes_on():
    grader = Grader(seconds=2)
    assert grader.equal("5", "5")
    started = time.monotonic()
    assert not grader.equal("9**9**9**9", "5")
    assert 1.9 < time.monotonic() - started < 20  # it was the limit that ended it, and soon
    assert grader.equal("5", "5")
    grader.close()
