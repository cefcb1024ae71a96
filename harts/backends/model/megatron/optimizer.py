"""Gradients and updates of a model that is split over processes, by Megatron's own data parallelism and optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, distributed

from harts.backends.gradients import Optimizer
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.parts import Part
from harts.errors import HartsError


def data_parallel(module: Any, config: MegatronConfig) -> Any:
    """The module with gradients in float32 buffers, summed over replicas."""
    wanted = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    return DistributedDataParallel(module.config, wanted, module)


def built_optimizer(name: Optimizer, learning_rate: float, model: Any, config: MegatronConfig) -> Any:
    """As `harts.backends.gradients.build_optimizer`, with weights and state in float32."""
    options = OptimizerConfig(
        optimizer={"sgd": "sgd", "adamw": "adam"}[name],
        lr=learning_rate,
        weight_decay=0.0,
        sgd_momentum=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        clip_grad=0.0,
        bf16=config.dtype == "bfloat16",
        params_dtype=config.torch_dtype,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    return get_megatron_optimizer(options, [model])


def norm_over_processes(model: Any, parts: Iterable[tuple[Part, Tensor]], distributed_optimizer: bool) -> float:
    """Euclidean norm of the summed gradients, each counted once, alike on every process.

    Args:
        model: `DistributedDataParallel` after its gradients were summed.
        parts: its parameters.
        distributed_optimizer: whether a replica has the sum of its range of the gradients only.

    Raises:
        HartsError: a gradient is not finite; on every process alike.
    """
    squares = [(part.name, _square(held)) for part, held in _held(model, parts, distributed_optimizer)]
    nothing = next(model.parameters()).new_zeros((), dtype=torch.float64)  # other processes may count all of its own
    total = torch.stack([nothing, *(square for _, square in squares)]).sum()
    distributed.all_reduce(total)
    if not math.isfinite(float(total)):
        bad = [name for name, square in squares if not math.isfinite(float(square))]
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, bad)
        names = sorted({name for each in found for name in each})
        raise HartsError(f"parameter {names[0]}: its gradient is not finite")
    return math.sqrt(float(total))


def _square(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)  # without a copy in float64
    return norm.square()


def _held(model: Any, parts: Iterable[tuple[Part, Tensor]], sharded: bool) -> Iterator[tuple[Part, Tensor]]:
    """Of every parameter, what of its gradient counts on this process."""
    for part, parameter in parts:
        if not sharded:
            if part.leads:
                yield part, parameter.main_grad  # type: ignore[attr-defined]  # Megatron sets it
        elif part.leads_tensor:
            yield part, _own_range(model, parameter, part)


def _own_range(model: Any, parameter: Tensor, part: Part) -> Tensor:
    """Of a parameter's gradient, what lies in this replica's range of its bucket."""
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        if parameter in buffer.param_index_map:
            first, last, number = buffer.param_index_map[parameter]
            bucket = buffer.buckets[number]
            size = bucket.grad_data.numel() // part.replicas
            low = bucket.offset + part.replica * size
            begin, end = max(first, low), min(last, low + size)
            gradient: Tensor = buffer.grad_data[begin : max(begin, end)]
            return gradient
    raise AssertionError("a parameter is in no buffer of gradients")
