"""The processes that a Megatron model is split over, and what of it each has."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import distributed

from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.parallel import ParallelConfig, parallel_faults
from harts.errors import BackendError, ConfigError


class Groups(NamedTuple):
    """Groups that this process is in."""

    tp: Any
    cp: Any
    pp: Any
    dp: Any
    """Processes that have the same part of the model and compute other microbatches."""
    dp_cp: Any
    """Processes that have the same part of the layers, experts apart."""
    expert_dp: Any
    """Processes that have the same routed experts."""
    ep: Any
    tp_cp: Any
    """Processes that share the rows of a microbatch."""


def join(config: MegatronConfig, device: str) -> Groups:
    """Make Megatron's process groups, if there are none.

    Processes find each other as `torchrun` has it; without it there is one.

    Raises:
        BackendError: there is no GPU, or groups of other sizes are there.
        ConfigError: the model cannot be split so.
    """
    _check_gpu()
    if not distributed.is_initialized():
        _start(device)
    parallel, processes = config.parallel, distributed.get_world_size()
    faults = parallel_faults(config, processes)
    if faults:
        raise ConfigError("\n".join(f"model: {fault}" for fault in faults))
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
        )
    _check_sizes(parallel)
    if not get_cuda_rng_tracker().is_initialized():  # Megatron asks for the random state of dropout, used or not
        model_parallel_cuda_manual_seed(config.seed)
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_dp=parallel_state.get_expert_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
    )


def _check_gpu() -> None:
    try:
        torch.cuda.current_device()  # Megatron's layers ask for it wherever they are
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"models: megatron: needs a GPU: {str(error).splitlines()[0]}") from error


def _start(device: str) -> None:
    on_gpu = torch.device(device).type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" not in os.environ:
        store = distributed.HashStore()  # type: ignore[attr-defined]  # there, but not in the list of exports
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(backend)


def _check_sizes(parallel: ParallelConfig) -> None:
    there = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
    wrong = [
        f"{name} is {getattr(parallel, name)}, the group has {n}"
        for name, n in there.items()
        if n != getattr(parallel, name)
    ]
    if wrong:
        raise BackendError("\n".join(f"models: megatron: parallel: {each}" for each in wrong))
