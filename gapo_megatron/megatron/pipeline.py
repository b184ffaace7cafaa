"""Megatron's pipeline schedules over micro-batches of different lengths."""

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from gapo_megatron.megatron import runtime


class InterleavedCommunicator(P2PCommunicator):
    """Exchanges shapes in the order and over the groups in which Megatron exchanges the tensors themselves.

    In the interleaved schedule over two stages, a stage's next and previous one are the same rank. Megatron then keeps the
    two directions apart for tensors (`_p2p_ops`), but not for the shapes that go before them, which would be mixed up.
    One object serves one run of the schedule.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(pp_group=groups.pp, config=config)
        self._sends: list[Any] = []

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        def shape_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else torch.tensor(tensor.size(), device=runtime.device())

        def buffer(wanted: bool) -> torch.Tensor | None:
            return torch.zeros(3, dtype=torch.int64, device=runtime.device()) if wanted else None

        received = {"recv_prev": buffer(recv_prev), "recv_next": buffer(recv_next)}
        sent = {"send_prev": shape_of(tensor_send_prev), "send_next": shape_of(tensor_send_next)}
        requests = _p2p_ops(
            **{f"tensor_{name}": tensor for name, tensor in (received | sent).items()},
            group=self.pp_group,
            prev_pipeline_rank=cast(int, self.prev_rank),
            next_pipeline_rank=cast(int, self.next_rank),
        )
        # Waiting for a send could close a ring of stages that wait for one another: only keep it alive.
        self._sends += [(requests.pop(name), tensor) for name, tensor in sent.items() if tensor is not None]
        for request in requests.values():
            request.wait()
        return tuple([0, 0, 0] if tensor is None else tensor.tolist() for tensor in received.values())


def run_schedule(config: TransformerConfig, **arguments: Any) -> list[Any]:
    """Call the schedule of Megatron (none, 1F1B or interleaved) that fits `config`; see `schedules` for `arguments`."""
    schedule: Callable = get_forward_backward_func()
    if config.virtual_pipeline_model_parallel_size is not None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        arguments |= dict(p2p_communicator=InterleavedCommunicator(config, groups), pg_collection=groups)
    return schedule(**arguments)
