"""The same policy step in one process with transformers and autograd, written from the paper's equations."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

EPS_LO, EPS_HI_MAX = 3e-3, 5e-3


class ReferencePolicy:
    """A transformers model with plain GAPO (eq. 2, 11, 12, 13, token aggregation) and torch's AdamW."""

    def __init__(self, model_path: str, temperature: float = 0.8, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager")
        # transformers drops the gradient of the padding token's embedding, also where that token ends a real turn.
        self.model.get_input_embeddings().padding_idx = None
        self.temperature = temperature

    def distributions(self, tokens: torch.Tensor) -> torch.distributions.Categorical:
        """Of each token but the first: [length - 1]."""
        logits = self.model(tokens[None]).logits[0, :-1].float() / self.temperature
        return torch.distributions.Categorical(logits=logits)

    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """[length - 1]."""
        return self.distributions(tokens).log_prob(tokens[1:])

    def mean_entropy(self, samples: list[dict[str, Any]]) -> float:
        """Of the distributions from which the response tokens were drawn, in nats."""
        entropies = [self.distributions(s["tokens"]).entropy()[s["response_mask"]] for s in samples]
        return float(torch.cat(entropies).double().mean())

    def loss(
        self,
        samples: list[dict[str, Any]],
        old_log_probs: list[torch.Tensor],
        group_size: int,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
    ) -> torch.Tensor:
        """Token-mean GAPO of the mini-batch, with KL (k3) and entropy terms; rollouts without response take no part."""
        total, num_tokens = torch.zeros(()), 0
        for sample, old in zip(samples, old_log_probs, strict=True):
            mask = sample["response_mask"]
            count = int(mask.sum())
            if count == 0:
                continue
            distributions = self.distributions(sample["tokens"])
            log_probs = distributions.log_prob(sample["tokens"][1:])
            log_ratio = (log_probs - old - sample["noise"])[mask]
            ratio = log_ratio.mean().exp()  # eq. 13
            c, k = sample["group_correct"], group_size
            advantage = sample["correct"] - c / k  # eq. 2
            eps_hi = EPS_LO + (EPS_HI_MAX - EPS_LO) * (k - c) / (k - 1) if sample["correct"] else EPS_LO  # eq. 11
            clipped = ratio.clamp(1 - EPS_LO, 1 + eps_hi)
            total = total + count * torch.maximum(-advantage * ratio, -advantage * clipped)  # eq. 12
            if kl_coef:
                d = (log_probs - sample["base_log_probs"])[mask]
                total = total + kl_coef * ((-d).exp() - 1 + d).clamp(max=10).sum()  # the bound is OpenRLHF's
            total = total - entropy_coef * distributions.entropy()[mask].sum()
            num_tokens += count
        return total / num_tokens

    def gradients(self, *args: Any) -> dict[str, torch.Tensor]:
        """Of `loss`, by the name of the tensor in the model's folder."""
        self.model.zero_grad()
        self.loss(*args).backward()
        return self._as_saved({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})

    def parameters(self) -> dict[str, torch.Tensor]:
        """By the name of the tensor in the model's folder."""
        return self._as_saved(dict(self.model.named_parameters()))

    def _as_saved(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """transformers stacks the experts' weights in memory; its own conversion undoes that, for gradients as well."""
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return dict(revert_weight_conversion(self.model, tensors))

    def train(self, steps: int, settings: Any, *args: Any) -> dict[str, torch.Tensor]:
        """`parameters()` after `steps` of AdamW; biases and norms are not decayed."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [dict(params=matrices, weight_decay=settings.weight_decay), dict(params=vectors, weight_decay=0.0)],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )
        for _ in range(steps):
            self.gradients(*args)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_norm)
            optimizer.step()
        return self.parameters()
