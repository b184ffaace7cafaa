"""The policy: Megatron's GPTModel whose last stage returns log-probs of the response tokens instead of logits."""

from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapo_megatron.megatron import runtime
from gapo_megatron.megatron.batch import MicroBatch
from gapo_megatron.megatron.families import head_dim
from gapo_megatron.megatron.layers import block_spec
from gapo_megatron.megatron.log_probs import vocab_parallel_log_probs


class PolicyModel(GPTModel):
    """One pipeline stage of the policy, or one chunk of it under the interleaved schedule, over packed sequences.

    Args:
        config: of `transformer_config`.
        hf_config: the Hugging Face configuration (vocabulary, tied embeddings, rotary parameters).
        temperature: of the rollouts; it divides the logits here as it did in sampling.
        chunk: index among this stage's chunks (Megatron's `vp_stage`), or None where a stage is one chunk.
    """

    def __init__(self, config: TransformerConfig, hf_config: Any, temperature: float, chunk: int | None = None) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=cast(Any, block_spec(config, chunk)),
            vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            vp_stage=chunk,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="rope",
        )
        self.true_vocab_size = hf_config.vocab_size
        self.temperature = temperature
        self.inv_freq = rotary_inverse_frequencies(hf_config).to(runtime.device())

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Run this stage on one micro-batch.

        Returns:
            [2, num_response_tokens], log-probs and entropies, of this context-parallel rank, on the last stage; hidden
            states [tokens (/ TP under sequence parallelism), 1, hidden_size] on the others.
        """
        embedded = self.embedding(batch.input_ids, batch.position_ids) if self.pre_process else None
        hidden_states = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self._rotary_angles(batch.position_ids),
            # Their format is not "thd": the angles are per token already, so the rotation is one call for the whole pack.
            packed_seq_params=batch.sequences,
        )
        return self._response_log_probs(hidden_states, batch) if self.post_process else hidden_states

    def _rotary_angles(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, 1, head_dim] fp32."""
        angles = torch.outer(position_ids.view(-1).float(), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def _response_log_probs(self, hidden_states: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        group = self.pg_collection.tp
        if self.share_embeddings_and_output_weights:
            weight = cast(torch.Tensor, self.shared_embedding_or_output_weight())
        else:
            weight = cast(torch.Tensor, self.output_layer.weight)
        # Either way the gradient of the hidden states is summed over the tensor-parallel ranks.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        hidden = hidden_states.squeeze(1).index_select(0, batch.response_positions)
        log_probs, entropy = vocab_parallel_log_probs(
            hidden, weight, batch.labels, self.true_vocab_size, group, self.temperature
        )
        return torch.stack((log_probs, entropy))


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def rotary_inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] of `hf_config.rope_parameters`, by transformers' own functions.

    Raises:
        ValueError: a rotary type that scales the attention or depends on the length.
    """
    parameters = hf_config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        dim = head_dim(hf_config)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (parameters["rope_theta"] ** exponents)
    if rope_type not in ("linear", "llama3"):
        raise ValueError(
            f"--actor.model_name_or_path: rope_type {rope_type!r} is not supported by --actor.backend megatron; "
            "use a model with rope_type default, linear or llama3"
        )
    inverse_frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    assert attention_factor == 1.0
    return inverse_frequencies
