"""Times of candidates in interleaved repeats, and the memory that a candidate takes at most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from linear_bench.candidates import Candidate, Part


class Times(NamedTuple):
    """Milliseconds of each repeat."""

    forward: list[float]
    both: list[float]
    """Forward and backward."""

    def summary(self) -> dict[str, dict[str, float]]:
        """Median, least and most of both."""
        return {
            name: {"median": median(each), "least": min(each), "most": max(each)}
            for name, each in self._asdict().items()
        }


def time_all(candidates: Sequence[Candidate], repeats: int, device: str) -> dict[str, Times]:
    """Run all candidates in turn, each repeat beginning with another one: what one leaves behind meets all others."""
    for candidate in candidates:
        for _ in range(2):
            _timed(candidate, device)
    found = {candidate.name: Times([], []) for candidate in candidates}
    for repeat in range(repeats):
        shift = repeat % len(candidates)
        for candidate in [*candidates[shift:], *candidates[:shift]]:
            forward, both = _timed(candidate, device)
            found[candidate.name].forward.append(forward)
            found[candidate.name].both.append(both)
    return found


def run(part: Part) -> tuple[Tensor | list[Tensor], tuple[Tensor, ...]]:
    """Output and the gradients of all leaves."""
    output = part.run(part.leaves)
    return output, torch.autograd.grad(output, list(part.leaves.values()), part.upstream)


def peak_bytes(candidate: Candidate) -> int:
    """Most memory allocated during forward and backward, less what was allocated before, on a CUDA device."""
    (part,) = candidate.parts
    run(part)  # what is made once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run(part)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def _timed(candidate: Candidate, device: str) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward, summed over the parts."""
    one = _cuda_ms if torch.device(device).type == "cuda" else _host_ms
    parts = [one(part) for part in candidate.parts]
    return sum(forward for forward, _ in parts), sum(both for _, both in parts)


def _cuda_ms(part: Part) -> tuple[float, float]:
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    run(
        part
    )  # keeps the device busy while the host launches the call that is timed, as the layer before does in training
    start.record()
    output = part.run(part.leaves)
    middle.record()
    torch.autograd.grad(output, list(part.leaves.values()), part.upstream)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle), start.elapsed_time(end)


def _host_ms(part: Part) -> tuple[float, float]:
    start = time.perf_counter()
    output = part.run(part.leaves)
    middle = time.perf_counter()
    torch.autograd.grad(output, list(part.leaves.values()), part.upstream)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - start)
