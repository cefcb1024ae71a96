"""One training step without the optimizer: forward and backward of every microbatch, then the gradient's norm and clip.

The device's queue is not waited for within a pass: times are between marks in the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.pipeline import Pipeline
from step_bench.steps import Microbatch, Side

CLIP = 1.0
"""Largest Euclidean norm of the gradient."""
TIMES = ("forward", "backward", "gradient", "total")


class Clock:
    """Marks in the queue of a CUDA device, or on the host."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"

    def mark(self) -> Any:
        """Now, for this queue."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the queue is empty."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks that have passed."""
        return float(first.elapsed_time(last) / 1e3 if self.cuda else last - first)


class Memory(NamedTuple):
    """Bytes allocated on a CUDA device."""

    peak: int
    """The most at any time, parameters and gradients included."""
    held: int
    """At the end: parameters and gradients."""


class Pass(NamedTuple):
    """One side's step."""

    seconds: dict[str, float]
    """`TIMES`: of all forward passes, all backward passes, norm and clip, and from the start to the end."""
    loss: float
    norm: float
    """Of the gradient, before the clip."""
    memory: Memory | None
    """None without a CUDA device."""


def run(pipeline: Pipeline, side: Side, clock: Clock, tell: Callable[[int], None]) -> Pass:
    """Run a side; gradients are left in the parameters, clipped.

    Args:
        pipeline: holds the model.
        side: its microbatches.
        clock: of the model's device.
        tell: called with the number of microbatches that are queued.
    """
    module = pipeline.env.model.module
    module.zero_grad(set_to_none=True)
    clock.wait()
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    start = clock.mark()
    marks, losses = [], []
    for done, microbatch in enumerate(side.microbatches, 1):
        begin = clock.mark()
        loss = weighted(pipeline.logprobs(microbatch.layout).logprobs, microbatch)
        middle = clock.mark()
        loss.backward()
        marks.append((begin, middle, clock.mark()))
        losses.append(loss.detach())
        del loss  # and with it the graph
        tell(done)
    begin = clock.mark()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    end = clock.mark()
    clock.wait()
    seconds = {
        "forward": sum(clock.seconds(a, b) for a, b, _ in marks),
        "backward": sum(clock.seconds(b, c) for _, b, c in marks),
        "gradient": clock.seconds(begin, end),
        "total": clock.seconds(start, end),
    }
    memory = Memory(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if clock.cuda else None
    return Pass(seconds, float(torch.stack(losses).sum()), float(norm), memory)


def weighted(logprobs: Tensor, microbatch: Microbatch) -> Tensor:
    """A microbatch's share of the step's loss, float64; log-probs of other tokens may be NaN."""
    return -(logprobs[microbatch.trained].double() * microbatch.weight).sum()
