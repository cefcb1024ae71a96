"""Whether both sides compute the same: loss, every gradient, and logits of some positions, before any time is taken."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.linear.dtypes import wide_dtype
from harts.ir import CompactLayout
from harts.ir.base import Int64
from harts.pipeline import Pipeline
from harts.train.check import TOLERANCE
from step_bench.passes import weighted
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
    logits: Tensor
    """Of the sample, float32 or wider, on the host, [n, V]."""


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


def execute(pipeline: Pipeline, side: Side, sample: Sample, *, backward: bool = True) -> Found:
    """Run a side; with `backward`, gradients are left in the parameters."""
    pipeline.env.model.module.zero_grad(set_to_none=True)
    logits: Any = None
    losses = []
    for microbatch in side.microbatches:
        members, rows = sample_rows(microbatch.layout, sample)
        with torch.set_grad_enabled(backward):
            outputs = pipeline.stage("execute").run(microbatch.layout)
            loss = weighted(pipeline.stage("restore").run(outputs).logprobs, microbatch)
        if backward:
            loss.backward()
        losses.append(float(loss.detach()))
        found = _logits(outputs.hidden.detach(), pipeline.env.model.head_weight().detach(), rows)
        logits = found.new_empty(len(sample.key), found.shape[1]) if logits is None else logits
        logits[torch.from_numpy(members)] = found
    return Found(sum(losses), logits)


def _logits(hidden: Tensor, head: Tensor, rows: Int64) -> Tensor:
    dtype = wide_dtype(hidden, head)
    picked = hidden[torch.from_numpy(rows).to(hidden.device)]
    return (picked.to(dtype) @ head.to(dtype).T).cpu()


def parity(pipeline: Pipeline, made: Cut, other: Side, sample: Sample) -> dict[str, Any]:
    """Compare HARTS with flat, and flat with itself: in other microbatches, and once more in the same ones.

    Two gradients are held at a time, beside the parameters.

    Args:
        pipeline: holds the model.
        made: both sides.
        other: the flat side in other microbatches.
        sample: positions whose logits are compared.

    Returns:
        `faults`, `differences` of HARTS and `repacked` from flat, and `off_cosine` of these and of `rerun`: one less
        the cosine of logits with those of flat, mean and most over the sample.
    """
    module = pipeline.env.model.module
    flat = execute(pipeline, made.flat, sample)
    kept = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    found = {"HARTS": execute(pipeline, made.ours, sample)}
    apart = {"HARTS": difference(module, kept, found["HARTS"].loss, flat.loss)}
    found["repacked"] = execute(pipeline, other, sample)
    apart["repacked"] = difference(module, kept, found["repacked"].loss, flat.loss)
    found["rerun"] = execute(pipeline, made.flat, sample, backward=False)
    module.zero_grad(set_to_none=True)
    return {
        "faults": faults(apart["HARTS"], apart["repacked"], pipeline.env.dtype),
        "loss": flat.loss,
        "differences": {name: each._asdict() for name, each in apart.items()},
        "off_cosine": {name: off_cosine(each.logits, flat.logits) for name, each in found.items()},
        "samples": len(sample.key),
    }


def difference(module: torch.nn.Module, kept: dict[str, Tensor], loss: float, flat_loss: float) -> Difference:
    """Compare the gradients that a module's parameters hold with some that were kept."""
    squares: dict[str, tuple[float, float]] = {}
    for name, each in module.named_parameters():
        ours, theirs = each.grad, kept.get(name)
        if ours is None and theirs is None:
            continue
        a = torch.zeros_like(each) if ours is None else ours
        b = torch.zeros_like(each) if theirs is None else theirs
        squares[name] = float((a.double() - b.double()).square().sum()), float(b.double().square().sum())
    apart, size = (sum(each[i] for each in squares.values()) for i in range(2))
    worst = max(squares, key=lambda name: _farness(*squares[name]))
    return Difference(
        _relative(abs(loss - flat_loss), abs(flat_loss)),
        _relative(math.sqrt(apart), math.sqrt(size)),
        worst,
        _farness(*squares[worst]),
        _relative(math.sqrt(squares[worst][1]), math.sqrt(size)),
    )


def _farness(apart: float, size: float) -> float:
    found = _relative(math.sqrt(apart), math.sqrt(size))
    return math.inf if math.isnan(found) else found


def _relative(apart: float, size: float) -> float:
    if size:
        return apart / size
    return math.inf if apart else 0.0


def off_cosine(a: Tensor, b: Tensor) -> dict[str, float]:
    """1 - cosine of the logits of each position, mean and most, in float64: half a squared distance on the sphere."""
    a, b = (each.double() / each.double().norm(dim=1, keepdim=True) for each in (a, b))
    off = (a - b).square().sum(1) / 2
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
