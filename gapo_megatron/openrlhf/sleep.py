"""An actor that leaves its device to vLLM between OpenRLHF's calls (`--ds.enable_sleep`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gapo_megatron.megatron.engine import PolicyEngine
from gapo_megatron.megatron.offload import Part


class SleepMixin:
    """For Ray actors with an `engine`. OpenRLHF trains between `reload_states` and `offload_states`; every other call
    brings back what it needs by `awake`."""

    engine: PolicyEngine
    args: Any

    def offload_states(self) -> None:
        """Give the device memory back."""
        self.engine.offload()

    def reload_states(self) -> None:
        """Take it again, to train."""
        self.engine.reload()

    @contextmanager
    def awake(self, *parts: Part) -> Iterator[None]:
        """Have `parts` of the engine on the device; under `--ds.enable_sleep` nothing stays there afterwards."""
        self.engine.reload(*parts)
        yield
        if self.args.ds.enable_sleep:
            self.engine.offload()
