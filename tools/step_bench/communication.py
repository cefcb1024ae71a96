"""Time that processes spend in exchanges with each other, by the profiler."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harts.pipeline import Pipeline
from step_bench.passes import Listener, accumulate
from step_bench.processes import gathered, together
from step_bench.steps import Side


def communication(pipeline: Pipeline, side: Side) -> dict[str, float]:
    """Seconds of NCCL's kernels in forward, backward and sum of gradients, waiting for others included.

    Args:
        pipeline: holds the model, on a GPU; it has run these microbatches before.
        side: what to run.

    Returns:
        By kind of kernel, a mean over processes.
    """
    together()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        accumulate(side, Listener(pipeline))
        torch.cuda.synchronize()
    mine: dict[str, float] = defaultdict(float)
    for each in profiler.key_averages():
        if each.device_type == DeviceType.CUDA and each.key.startswith("nccl") and ":" not in each.key:
            mine[kind(each.key)] += each.self_device_time_total / 1e6
    pipeline.env.model.module.zero_grad(set_to_none=True)
    found = gathered(dict(mine))
    names = sorted({name for each in found for name in each})
    return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in names}


def kind(kernel: str) -> str:
    """`AllReduce` of ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)."""
    return kernel.removeprefix("ncclDevKernel_").partition("_")[0].partition("(")[0]
