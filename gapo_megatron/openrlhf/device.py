"""The device of OpenRLHF's Ray actors, also where there is no CUDA."""

import torch

from gapo_megatron.megatron import runtime


def prepare() -> None:
    """Called before an actor sets up its process group. Does nothing where there is CUDA."""
    runtime.install_cpu_shim()


def current() -> torch.device:
    """This process's device."""
    return runtime.device()
