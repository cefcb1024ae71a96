"""Whether both sides compute the same: loss, every gradient, and logits of some positions, before any time is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import Model
from harts.backends.linear.dtypes import wide_dtype
from harts.ir import CompactLayout, CompactOutputs
from harts.ir.base import Int64
from harts.pipeline import Pipeline
from harts.train.check import TOLERANCE
from step_bench.passes import Listener, accumulate
from step_bench.processes import gathered, gradients, has_logits
from step_bench.steps import Cut, Side

LOSS = 1e-6
"""Largest relative difference of the losses in float32 and wider."""
NARROW_LOSS = 1e-3
"""The same in 16 bits."""
SPREAD, NARROW = 2.0, 0.05
"""Largest relative difference of the gradient in 16 bits: so many times that of the flat run in other microbatches, or
this if it is more. A wrong state, window or count moves a gradient by 0.3 and more."""


class Sample(NamedTuple):
    """Some positions of some trajectories."""

    key: Int64
    """Row of the trajectory in the batch, ascending."""
    position: Int64


class Found(NamedTuple):
    """What one side gave."""

    loss: float
    hidden: Tensor
    """Of the sample, float32 or wider, on the host, alike on every process, [n, hidden]."""


class Difference(NamedTuple):
    """One side's results against those of the flat run."""

    loss: float
    """Relative."""
    gradient: float
    """|a - b| / |b| over all parameters."""
    worst: str
    """Parameter whose gradient is farthest off, relative to itself."""
    worst_gradient: float
    worst_share: float
    """Norm of its gradient over that of the whole gradient."""


def sampled(lengths: Int64, keys: Int64, count: int, seed: int) -> Sample:
    """Positions drawn evenly from all of some trajectories.

    Args:
        lengths: tokens of every trajectory of the batch.
        keys: those to draw from, ascending.
        count: how many positions.
        seed: of the draw.
    """
    ends = np.cumsum(lengths[keys])
    total = int(ends[-1])
    flat = np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))
    which = np.searchsorted(ends, flat, side="right")
    return Sample(keys[which], flat - (ends - lengths[keys])[which])


def sample_rows(layout: CompactLayout, sample: Sample) -> tuple[Int64, Int64]:
    """(members of the sample that a microbatch holds, their rows in it)."""
    tree = layout.plan.tree
    place = np.searchsorted(tree.key, sample.key).clip(max=len(tree.key) - 1)
    members = np.flatnonzero(tree.key[place] == sample.key)
    flat = tree.columns.offset[place[members]] + sample.position[members]
    return members, layout.semantic_map.rows()[flat]


class _Sampled(Listener):
    def __init__(self, pipeline: Pipeline, sample: Sample) -> None:
        super().__init__(pipeline)
        self.sample = sample
        self.dtype = torch.promote_types(pipeline.env.dtype, torch.float32)
        self.found: dict[int, Tensor] = {}

    def logprobs(self, outputs: CompactOutputs) -> Tensor:
        hidden: Any = outputs.hidden
        members, rows = sample_rows(outputs.layout, self.sample)
        picked = hidden.detach()[torch.from_numpy(rows).to(hidden.device)].to(self.dtype).cpu()
        self.found |= dict(zip(members.tolist(), picked, strict=True))
        return super().logprobs(outputs)

    def states(self) -> Tensor:
        """Hidden states of the sample, each from the process that leads those that have it."""
        model, widths = self.pipeline.env.model, {len(each) for each in self.found.values()}
        width = max(max(told, default=0) for told in gathered(widths))
        made = torch.zeros(len(self.sample.key), width, dtype=self.dtype)
        if model.split.leads:
            for member, each in self.found.items():
                made[member] = each
        return model.total(made)


def execute(pipeline: Pipeline, side: Side, sample: Sample) -> Found:
    """Run a side; gradients are left with the model."""
    pipeline.env.model.module.zero_grad(set_to_none=True)
    listener = _Sampled(pipeline, sample)
    accumulate(side, listener)
    return Found(listener.loss(), listener.states())


def logits(model: Model, found: Found) -> Tensor:
    """Of the sample: those that count on this process, on the host, [n, rows of the LM head]."""
    if not has_logits(model):
        return found.hidden.new_zeros(len(found.hidden), 0)
    head = model.head_weight().detach()
    dtype = wide_dtype(found.hidden, head)
    return (found.hidden.to(device=head.device, dtype=dtype) @ head.to(dtype).T).cpu()


def parity(pipeline: Pipeline, made: Cut, other: Side, sample: Sample) -> dict[str, Any]:
    """Compare HARTS with flat, and flat with itself: in other microbatches, and once more in the same ones.

    Two gradients are held at a time, beside the parameters.

    Args:
        pipeline: holds the model.
        made: both sides.
        other: the flat side in other microbatches.
        sample: positions whose logits are compared.

    Returns:
        `faults`, `differences` of HARTS, `repacked` and `rerun` from flat, and `off_cosine` of these: one less the
        cosine of logits with those of flat, mean and most over the sample.
    """
    model = pipeline.env.model
    flat = execute(pipeline, made.flat, sample)
    kept = [_kept(each, model) for _, _, each, _ in gradients(model)]
    wanted, apart, off = logits(model, flat), {}, {}
    for name, side in {"HARTS": made.ours, "repacked": other, "rerun": made.flat}.items():
        found = execute(pipeline, side, sample)
        apart[name] = difference(model, kept, found.loss, flat.loss)
        off[name] = off_cosine(logits(model, found), wanted, model.total)
    model.module.zero_grad(set_to_none=True)
    return {
        "faults": faults(apart["HARTS"], apart["repacked"], pipeline.env.dtype),
        "loss": flat.loss,
        "differences": {name: each._asdict() for name, each in apart.items()},
        "off_cosine": off,
        "samples": len(sample.key),
    }


def _kept(gradient: Tensor | None, model: Model) -> Tensor | None:
    """A gradient that the next pass does not change: `grad` is let go of, buffers of Megatron are filled again."""
    return gradient if gradient is None or getattr(model, "parallel", None) is None else gradient.clone()


def difference(model: Model, kept: list[Tensor | None], loss: float, flat_loss: float) -> Difference:
    """Compare the gradients that a model holds with some that were kept; alike on every process."""
    squares: dict[str, tuple[float, float]] = {}
    for (name, each, ours, counts), theirs in zip(gradients(model), kept, strict=True):
        if not counts or (ours is None and theirs is None):
            continue
        a = torch.zeros_like(each) if ours is None else ours
        b = torch.zeros_like(each) if theirs is None else theirs
        squares[name] = float((a.double() - b.double()).square().sum()), float(b.double().square().sum())
    squares = _summed(gathered(squares))
    apart, size = (sum(each[i] for each in squares.values()) for i in range(2))
    worst = max(squares, key=lambda name: _farness(*squares[name]))
    return Difference(
        _relative(abs(loss - flat_loss), abs(flat_loss)),
        _relative(math.sqrt(apart), math.sqrt(size)),
        worst,
        _farness(*squares[worst]),
        _relative(math.sqrt(squares[worst][1]), math.sqrt(size)),
    )


def _summed(found: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Squares of whole parameters, from those of their parts."""
    names = dict.fromkeys(name for each in found for name in each)
    both = {name: [each[name] for each in found if name in each] for name in names}
    return {name: (sum(a for a, _ in each), sum(b for _, b in each)) for name, each in both.items()}


def _farness(apart: float, size: float) -> float:
    found = _relative(math.sqrt(apart), math.sqrt(size))
    return math.inf if math.isnan(found) else found


def _relative(apart: float, size: float) -> float:
    if size:
        return apart / size
    return math.inf if apart else 0.0


def off_cosine(a: Tensor, b: Tensor, total: Callable[[Tensor], Tensor] = lambda each: each) -> dict[str, float]:
    """1 - cosine of the logits of each position, mean and most, in float64: half a squared distance on the sphere.

    Args:
        a: of this process, [n, rows of the LM head].
        b: those that they are compared with.
        total: sums over processes.
    """
    sizes = [total(each.double().square().sum(1)).sqrt()[:, None] for each in (a, b)]
    off = total((a.double() / sizes[0] - b.double() / sizes[1]).square().sum(1)) / 2
    return {"mean": float(off.mean()), "most": float(off.max())}


def faults(ours: Difference, repacked: Difference, dtype: torch.dtype) -> list[str]:
    """Why parity does not hold, one sentence each; a NaN is a fault."""
    wide = dtype in TOLERANCE
    limits = {
        "loss": LOSS if wide else NARROW_LOSS,
        "gradient": TOLERANCE[dtype] if wide else max(NARROW, SPREAD * repacked.gradient),
    }
    found = []
    for name, limit in limits.items():
        value = getattr(ours, name)
        if not value <= limit:
            more = f"; worst is {ours.worst}, by {ours.worst_gradient:.1e}" if name == "gradient" else ""
            found.append(f"{name}: differs by a relative {value:.1e}, allowed is {limit:.1e}{more}")
    return found
