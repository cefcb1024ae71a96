"""What is different when a model is split over the processes that torchrun starts; of one process all is simple."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from parity_bench.host import on_host
from parity_bench.topology import topology
from torch import Tensor, distributed

from harts.backends.base import Model
from harts.backends.full.transformer_engine import TransformerEngine
from harts.errors import ConfigError
from harts.pipeline import Pipeline

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def surroundings(megatron: bool) -> Iterator[None]:
    """Where a model can run: Megatron without a GPU too. Its process groups are gone at the end."""
    if not megatron or find_spec("megatron") is None:
        yield
        return
    with nullcontext() if torch.cuda.is_available() else on_host():
        try:
            yield
        finally:
            if distributed.is_initialized():
                from megatron.core import parallel_state  # noqa: PLC0415  (heavy)

                parallel_state.destroy_model_parallel()
                distributed.destroy_process_group()


def overrides(name: str) -> list[str]:
    """What to set in a pipeline file for a topology.

    Raises:
        ConfigError: there is no such topology, or it is of another number of processes.
    """
    try:
        found = topology(name)
    except ValueError as error:
        raise ConfigError(f"--topology: {error}") from error
    if found.processes != PROCESSES:
        raise ConfigError(f"--topology: {name} is of {found.processes} processes, torchrun started {PROCESSES}")
    sharing = found.sizes["tensor"] if found.sequence else 1
    return [*found.overrides(), f"layout.row_multiple={found.sizes['context'] * sharing}"]


def check(pipeline: Pipeline) -> None:
    """Whether a model can be measured on these processes.

    Raises:
        ConfigError: each of several processes would measure a model of its own, the plan is for other replicas, or
            gradients are not whole on any process.
    """
    model: Any = pipeline.env.model
    if PROCESSES == 1:
        return
    if getattr(model, "parallel", None) is None:
        raise ConfigError(f"model: {type(model).__name__} is not split over the {PROCESSES} processes")
    planned: Any = pipeline.settings.components["partition"].config
    if planned.replicas != model.split.replicas:
        raise ConfigError(
            f"partition.replicas: the step is planned for {planned.replicas}, the model has {model.split.replicas}"
        )
    if model.config.parallel.distributed_optimizer:
        raise ConfigError("model.parallel.distributed_optimizer: a process has a range of gradients only, no parameter")


@contextmanager
def fixed_order(model: Any) -> Iterator[None]:
    """While it is active, Megatron sums outputs of experts in a fixed order: slower, and alike in every run.

    It looks at torch's setting for that. Other models' forward passes are alike without it, and `transformer_engine`
    would take other kernels.
    """
    if not hasattr(model, "parallel") or isinstance(model.full, TransformerEngine):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # what has no such algorithm runs as before
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def gathered(value: Any) -> list[Any]:
    """Of every process, in the order of their ranks."""
    if PROCESSES == 1:
        return [value]
    found: list[Any] = [None] * PROCESSES
    distributed.all_gather_object(found, value)
    return found


def together() -> None:
    """Wait for all processes."""
    if PROCESSES > 1:
        distributed.barrier()


def gradients(model: Model) -> Iterator[tuple[str, Tensor, Tensor | None, bool]]:
    """Of each parameter that this process has a part of: its name in the whole model, the part, the part's gradient,
    and whether the part counts here or on another process that has it too."""
    split: Any = model
    if getattr(model, "parallel", None) is None:
        for name, each in model.module.named_parameters():
            yield name, each, each.grad, True
        return
    from harts.backends.model.megatron.parts import parts_of  # noqa: PLC0415  (heavy)

    for part, each in parts_of(model.module, split.config, split.made.groups):
        yield part.name, each, each.main_grad, part.leads


def clipped(model: Model, most: float) -> float:
    """Euclidean norm of the step's gradients, which are scaled down to `most` if it is more."""
    parallel = getattr(model, "parallel", None)
    if parallel is None:
        return torch.nn.utils.clip_grad_norm_(model.module.parameters(), most)  # type: ignore[return-value]
    norm = model.gradient_norm()
    parallel.scale_gradients(min(1.0, most / (norm + 1e-6)))
    return norm


def has_logits(model: Model) -> bool:
    """Whether this process's rows of the LM head count: each row of it does on one process."""
    split = model.split
    return split.has_output and split.replica == 0 and (split.positions is None or split.positions.rank() == 0)
