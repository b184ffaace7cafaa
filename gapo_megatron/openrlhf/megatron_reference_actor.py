"""The reference model in OpenRLHF's Ray group, on Megatron-Core: the role of `ReferenceModelActor`."""

from typing import Any

from gapo_megatron.megatron.model_engine import ModelEngine
from gapo_megatron.openrlhf.engine_config import reference_settings
from gapo_megatron.openrlhf.megatron_model_actor import MegatronModelActor


class MegatronReferenceActor(MegatronModelActor):
    """One rank of a model that is never trained.

    On as many ranks as the policy it meets the same packs, so that the KL of a policy that was not trained yet is exactly 0.
    """

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        """Load the model."""
        self.join(strategy, strategy.args.reference_layout)
        self.engine = ModelEngine(pretrain, reference_settings(self.args))
