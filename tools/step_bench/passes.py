"""One training step without the optimizer: forward and backward of every microbatch, then the gradient's norm and clip.

The device's queue is not waited for within a pass: times are between marks in the queue. A model that is split over
processes runs its microbatches in the order of its own schedule, so a microbatch tells itself when its passes begin and
end; the slowest process's times count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.backends import gradients
from harts.ir import CompactOutputs
from harts.pipeline import Pipeline
from step_bench.processes import clipped, gathered, together
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
    """Bytes allocated on a CUDA device, of several the one with the largest peak."""

    peak: int
    """The most at any time, parameters and gradients included."""
    held: int
    """At the end: parameters and gradients."""


class Pass(NamedTuple):
    """One side's step."""

    seconds: dict[str, float]
    """`TIMES`: of all forward passes, all backward passes, norm and clip, and from the start to the end; of several
    processes those of the one with the largest total."""
    microbatches: dict[str, list[float]]
    """Forward and backward passes of each of its microbatches, in seconds, in the order in which they run."""
    loss: float
    norm: float
    """Of the gradient, before the clip."""
    memory: Memory | None
    """None without a CUDA device."""
    slot_imbalance: float | None
    """Forward and backward of each slot's slowest replica over the mean of its replicas, less 1, over all slots; None
    with one replica. Replicas that share experts wait for each other within a pass, which hides it."""


class Listener:
    """Runs microbatches, and hears what happens to them; those of this process alone, counted from 0."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.losses: list[Tensor] = []

    def hidden(self, microbatch: Microbatch) -> Tensor:
        """Hidden states of its rows; on all but the last pipeline stage what the next one takes."""
        outputs = self.pipeline.stage("execute").run(microbatch.layout)
        self.ran(outputs)
        made: Tensor = outputs.hidden
        return made

    def logprobs(self, outputs: CompactOutputs) -> Tensor:
        """Of its semantic positions."""
        made: Tensor = self.pipeline.stage("restore").run(outputs).logprobs
        return made

    def loss(self) -> float:
        """Of all microbatches, alike on every process."""
        model = self.pipeline.env.model
        loss = torch.zeros((), dtype=torch.float64)
        if self.losses and model.split.leads:
            loss += torch.stack(self.losses).sum().cpu()
        return float(model.total(loss))

    def ran(self, outputs: CompactOutputs) -> None:
        """The model has run, on this pipeline stage, in a forward pass."""

    def began(self) -> None:
        """A forward pass begins."""

    def ended(self) -> None:
        """It ends, with the loss if the model ends here."""

    def turned(self) -> None:
        """A backward pass begins."""

    def done(self) -> None:
        """It ends."""


def accumulate(side: Side, listener: Listener) -> None:
    """Forward and backward of a side's microbatches, replacing the gradients that the model holds."""
    model = listener.pipeline.env.model
    mine = side.microbatches[model.split.replica :: model.split.replicas]
    model.accumulate(len(mine), (_pass(each, listener) for each in mine))


def _pass(microbatch: Microbatch, listener: Listener) -> gradients.Pass:
    split = listener.pipeline.env.model.split

    def forward() -> CompactOutputs:
        listener.began()
        hidden = listener.hidden(microbatch)
        if not split.has_output:
            listener.ended()
            hidden = _turning(hidden, listener)
        return CompactOutputs(microbatch.layout, hidden)

    def loss(outputs: CompactOutputs) -> Tensor:
        share = weighted(listener.logprobs(outputs), microbatch)
        listener.losses.append(share.detach())
        listener.ended()
        return _turning(share, listener)

    return gradients.Pass(forward, loss, 0.0, 0.0)


def _turning(x: Tensor, listener: Listener) -> Tensor:
    turning: Tensor = _Turn.apply(x, listener)
    return turning


class _Turn(torch.autograd.Function):
    """Comes last, so it is where the backward pass begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, listener: Listener) -> Tensor:
        ctx.listener = listener
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        ctx.listener.turned()
        torch.autograd.Variable._execution_engine.queue_callback(ctx.listener.done)  # when all gradients are there
        return given[0], None


class _Timed(Listener):
    def __init__(self, pipeline: Pipeline, clock: Clock, tell: Callable[[int], None]) -> None:
        super().__init__(pipeline)
        self.clock, self.tell = clock, tell
        self.marks: dict[str, list[Any]] = {"began": [], "ended": [], "turned": [], "done": []}

    def _mark(self, name: str) -> None:
        self.marks[name].append(self.clock.mark())

    def began(self) -> None:
        self._mark("began")

    def ended(self) -> None:
        self._mark("ended")

    def turned(self) -> None:
        self._mark("turned")

    def done(self) -> None:
        self._mark("done")
        self.tell(len(self.marks["done"]))

    def seconds(self) -> dict[str, list[float]]:
        """Of each microbatch, which come back in the order in which they went."""
        both = {"forward": ("began", "ended"), "backward": ("turned", "done")}
        return {
            name: [self.clock.seconds(*pair) for pair in zip(*(self.marks[each] for each in ends), strict=True)]
            for name, ends in both.items()
        }


def run(pipeline: Pipeline, side: Side, clock: Clock, tell: Callable[[int], None]) -> Pass:
    """Run a side; gradients are left with the model, clipped.

    Args:
        pipeline: holds the model.
        side: its microbatches.
        clock: of the model's device.
        tell: called with the number of microbatches that are queued.
    """
    model = pipeline.env.model
    model.module.zero_grad(set_to_none=True)
    together()
    clock.wait()
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    listener = _Timed(pipeline, clock, tell)
    start = clock.mark()
    accumulate(side, listener)
    begin = clock.mark()
    norm = clipped(model, CLIP)
    end = clock.mark()
    clock.wait()
    each = listener.seconds()
    seconds = {name: sum(values) for name, values in each.items()}
    seconds |= {"gradient": clock.seconds(begin, end), "total": clock.seconds(start, end)}
    memory = Memory(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if clock.cuda else None
    of_slots = [a + b for a, b in zip(each["forward"], each["backward"], strict=True)]
    found = gathered((seconds, each, memory, model.split.replica, of_slots))
    slowest = max(found, key=lambda told: told[0]["total"])
    return Pass(
        *slowest[:2],
        listener.loss(),
        float(norm),
        max(told[2] for told in found) if clock.cuda else None,
        slot_imbalance([told[3:] for told in found]),
    )


def slot_imbalance(found: list[tuple[int, list[float]]]) -> float | None:
    """See `Pass.slot_imbalance`.

    Args:
        found: of each process, its replica and the seconds of its microbatches.
    """
    replicas: dict[int, list[float]] = {}
    for replica, seconds in found:
        before = replicas.setdefault(replica, seconds)
        replicas[replica] = [max(pair) for pair in zip(before, seconds, strict=True)]
    if len(replicas) == 1:
        return None
    slots = list(zip(*replicas.values(), strict=True))
    return sum(map(max, slots)) / sum(sum(slot) / len(slot) for slot in slots) - 1.0


def weighted(logprobs: Tensor, microbatch: Microbatch) -> Tensor:
    """A microbatch's share of the step's loss, float64; log-probs of other tokens may be NaN."""
    return -(logprobs[microbatch.trained].double() * microbatch.weight).sum()
