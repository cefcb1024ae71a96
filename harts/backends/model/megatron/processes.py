"""What Megatron asks of the process that it runs in, for a model in one process."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import distributed

from harts.errors import BackendError


def one_process(device: str) -> None:
    """Make process groups of this process alone, if there are none.

    Raises:
        BackendError: there is no GPU, or there are groups of several processes.
    """
    try:
        torch.cuda.current_device()  # Megatron's layers ask for it wherever they are
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"models: megatron: needs a GPU: {str(error).splitlines()[0]}") from error
    if not distributed.is_initialized():
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        store = distributed.HashStore()  # type: ignore[attr-defined]  # there, but not in the list of exports
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    world = distributed.get_world_size()
    if world != 1:
        raise BackendError(f"models: megatron: runs in one process, there are {world}")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
