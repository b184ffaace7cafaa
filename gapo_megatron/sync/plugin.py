"""vLLM loads this in each of its processes (entry point group `vllm.general_plugins`)."""

ENGINE_MODULE = "gapo_megatron.sync.gloo_engine"


def register() -> None:
    """Make the "gloo" backend known to vLLM's weight-transfer factories. May be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", ENGINE_MODULE, "GlooWeightTransferEngine")
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("gloo", ENGINE_MODULE, "GlooTrainerEngine")
