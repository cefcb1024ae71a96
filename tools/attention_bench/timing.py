"""Times of candidates in interleaved repeats, and the memory that each takes beside its inputs and results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from linear_bench.timing import Times
from torch import Tensor

from attention_bench.problem import Rows, Shape, attend
from harts.backends.base import FullAttention

SETTLING = 200.0
"""Milliseconds that a candidate runs before it is timed: a device at its power limit slows down within some tens of
milliseconds, and would time a candidate at the clock that the one before it has earned."""


class Candidate(NamedTuple):
    """A backend on compact or flat rows."""

    name: str
    backend: FullAttention
    rows: Rows
    upstream: Tensor
    """Gradient of the outputs."""
    repeats: int


class Measured(NamedTuple):
    """Of one candidate."""

    times: Times
    peak: int | None
    """Most bytes allocated beside inputs, outputs and gradients; None without a CUDA device."""


def measure_all(candidates: Sequence[Candidate], shape: Shape) -> dict[str, Measured]:
    """Run all candidates in turn, each repeat beginning with another one."""
    timed = _cuda_ms if _on_cuda(shape) else _host_ms
    warm = {each.name: _warm(each, shape, timed) for each in candidates}
    found = {each.name: Times([], []) for each in candidates}
    for repeat in range(max(each.repeats for each in candidates)):
        shift = repeat % len(candidates)
        for each in [*candidates[shift:], *candidates[:shift]]:
            if repeat < each.repeats:
                forward, both = timed(each, shape, warm[each.name].calls)
                found[each.name].forward.append(forward)
                found[each.name].both.append(both)
    return {name: Measured(times, warm[name].peak) for name, times in found.items()}


class _Warm(NamedTuple):
    calls: int
    """That are queued before the one that is timed, at least one."""
    peak: int | None


def _warm(candidate: Candidate, shape: Shape, timed: Callable[[Candidate, Shape, int], tuple[float, float]]) -> _Warm:
    """Run once, for the memory; once more for the time, when nothing is compiled or allocated any more."""
    cuda = _on_cuda(shape)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    timed(candidate, shape, 0)
    results = candidate.upstream.nbytes + sum(each.nbytes for each in candidate.rows.leaves.values())
    peak = torch.cuda.max_memory_allocated() - before - results if cuda else None
    _, both = timed(candidate, shape, 0)
    return _Warm(math.ceil(SETTLING / both), peak)


def _on_cuda(shape: Shape) -> bool:
    return torch.device(shape.device).type == "cuda"


def _forward(candidate: Candidate, shape: Shape) -> Tensor:
    return attend(candidate.backend, candidate.rows, shape)


def _backward(candidate: Candidate, output: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, list(candidate.rows.leaves.values()), candidate.upstream)


def _cuda_ms(candidate: Candidate, shape: Shape, calls: int) -> tuple[float, float]:
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    for _ in range(calls):  # they also keep the device busy while the host launches what is timed
        _backward(candidate, _forward(candidate, shape))
    start.record()
    output = _forward(candidate, shape)
    middle.record()
    _backward(candidate, output)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle), start.elapsed_time(end)


def _host_ms(candidate: Candidate, shape: Shape, _calls: int) -> tuple[float, float]:
    start = time.perf_counter()
    output = _forward(candidate, shape)
    middle = time.perf_counter()
    _backward(candidate, output)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - start)
