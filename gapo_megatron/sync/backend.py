"""Which of vLLM's weight-transfer engines carries the weights; both ends must choose the same one."""

from typing import Literal, get_args

import torch

Backend = Literal["gloo", "nccl", "ipc"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def transfer_backend(shares_device: bool) -> Backend:
    """The engine for this machine.

    Args:
        shares_device: a trainer rank and a vLLM worker use one device, where NCCL cannot have two ranks.
    """
    if not torch.cuda.is_available():
        return "gloo"
    return "ipc" if shares_device else "nccl"
