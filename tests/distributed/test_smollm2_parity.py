"""SmolLM2-135M on real text, under pipeline parallelism, against transformers in one process; fp32.

Tolerances: 1e-4 on log-probs. For gradients, 1e-4 on the norm of each tensor's error relative to the tensor's norm: in this
model single entries differ by more between two fp32 runs of transformers itself (eager and sdpa attention), because its
residual stream has a few huge channels, whose rounding reaches small entries.
"""

import pytest
import torch

from gapo_megatron.demo.model import prepare_model
from tests.distributed.policy_ranks import GROUP_SIZE, policy_on_ranks
from tests.distributed.reference_policy import ReferencePolicy

TOLERANCE = 1e-4
PROMPT = "What is {} + {}?"
RESPONSES = ("The sum is {}.", "{}", "Add the ones first, then the tens: that gives {}.", "It is about {}, I think.")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(prepare_model(tmp_path_factory.mktemp("model") / "smollm2"))


def text_rollouts(model: str) -> list[dict]:
    """Two groups of chat prompts with responses of different lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for a, b, correct_count in ((7, 5, 1), (12, 30, 3)):
        chat = [{"role": "user", "content": PROMPT.format(a, b)}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt)["input_ids"])
        for i, response in enumerate(RESPONSES):
            tokens = torch.tensor(tokenizer(prompt + response.format(a + b) + "<|im_end|>")["input_ids"])
            mask = torch.arange(len(tokens) - 1) >= start - 1
            noise = 0.02 * torch.randn(len(tokens) - 1, generator=generator)
            samples.append(
                dict(
                    tokens=tokens,
                    response_mask=mask,
                    noise=noise,
                    correct=float(i < correct_count),
                    group_correct=correct_count,
                )
            )
    return samples


@pytest.mark.slow
def test_smollm2_equals_transformers_under_pipeline_parallelism(ranks, model, record_property):
    samples = text_rollouts(model)
    policy = ReferencePolicy(model)
    with torch.no_grad():
        log_probs = [policy.log_probs(s["tokens"]) for s in samples]
    gradients = policy.gradients(samples, log_probs, GROUP_SIZE)
    for stages in (1, 2, 3):
        sizes = dict(pipeline_model_parallel_size=stages)
        result = ranks.run(stages, policy_on_ranks, model, sizes, samples, log_probs, dict(max_tokens=256), 0)[0]
        difference = max(
            float((a - b * s["response_mask"]).abs().max())
            for a, b, s in zip(result["log_probs"], log_probs, samples, strict=True)
        )
        errors = {n: float((g - gradients[n]).norm() / gradients[n].norm()) for n, g in result["gradients"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"PP{stages}: log-probs {difference:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
        assert difference <= TOLERANCE
        assert result["gradients"].keys() == gradients.keys()
        assert errors[worst] <= TOLERANCE, worst
