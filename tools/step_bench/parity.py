"""Whether both sides compute the same, before any time is taken: loss, every gradient, statistics of routers, logits of
some positions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
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
from step_bench.processes import fixed_order, gathered, gradients, has_logits
from step_bench.steps import Cut, Side

LOSS = 1e-6
"""Largest relative difference of the losses in float32 and wider."""
NARROW_LOSS = 1e-3
"""The same in 16 bits."""
SPREAD, SPREAD_OF_ONE, NARROW = 2.0, 4.0, 0.02
"""Largest relative difference in 16 bits, of the whole gradient and of that of one parameter: so many times what the
flat run differs from itself, or `NARROW` if that is more. `SPREAD` is that of routers and of logits, too."""
COSINE = 1e-9
"""1 - cosine that always passes: it is rounding of float32 at most."""
MOVED = 1e-3
"""Share of the assignments of experts that may be moved, however little the flat run differs from itself."""
MOST, MOST_OF_ONE = 0.5, 0.9
"""However much the flat run differs from itself: a gradient that is missing is off by 1."""
NAMED = 3
"""Parameters that are named if their gradients are too far off."""


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
    routers: Tensor
    """Their z statistic, then the assignments of each expert of each layer, of all microbatches; float64, on the host,
    alike on every process; [1] without experts."""


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
    parameters: dict[str, float]
    """Of each parameter's gradient, relative to itself."""
    router_z: float = 0.0
    """Relative, of the routers' z statistic; 0 without experts."""
    moved: float = 0.0
    """Share of all assignments of experts that are others; 0 without experts."""

    def told(self) -> dict[str, Any]:
        """Without what each parameter is off by."""
        return {name: value for name, value in self._asdict().items() if name != "parameters"}


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
        self.routers: Tensor | None = None

    def ran(self, outputs: CompactOutputs) -> None:
        if outputs.expert_load is None:
            return
        both: list[Any] = [outputs.router_z, outputs.expert_load]
        told = torch.cat([each.detach().double().cpu().flatten() for each in both])
        self.routers = told if self.routers is None else self.routers + told

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
    routers = torch.zeros(1, dtype=torch.float64) if listener.routers is None else listener.routers
    return Found(listener.loss(), listener.states(), pipeline.env.model.total(routers))


def rounded(pipeline: Pipeline, side: Side, sample: Sample, seed: int) -> Found:
    """Run a side with embeddings that are off by up to half a rounding step: what rounding alone makes of the results.

    A run that adds up in another order rounds otherwise in every layer; here it is as if one had.
    """
    handles = [part.register_forward_hook(_Jitter(seed)) for part in _embeddings(pipeline.env.model.module)[:1]]
    try:
        return execute(pipeline, side, sample)
    finally:
        for handle in handles:
            handle.remove()


def _embeddings(module: Any) -> list[Any]:
    """Of tokens, the outermost first; none on a process without the first pipeline stage."""
    return [each for each in module.modules() if re.search(r"(^|Model|Parallel)Embedding$", type(each).__name__)]


class _Jitter:
    """Multiplies outputs by 1 + eps / 2 * [-1, 1), alike on every process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, module: Any, given: Any, output: Tensor) -> Tensor:
        draw = torch.Generator(output.device).manual_seed(self.seed)
        wide = wide_dtype(output)
        noise = torch.rand(output.shape, generator=draw, device=output.device, dtype=wide) * 2 - 1
        return (output.to(wide) * (1 + noise * (torch.finfo(output.dtype).eps / 2))).to(output.dtype)


def logits(model: Model, found: Found) -> Tensor:
    """Of the sample: those that count on this process, on the host, [n, rows of the LM head]."""
    if not has_logits(model):
        return found.hidden.new_zeros(len(found.hidden), 0)
    head = model.head_weight().detach()
    dtype = wide_dtype(found.hidden, head)
    return (found.hidden.to(device=head.device, dtype=dtype) @ head.to(dtype).T).cpu()


def parity(pipeline: Pipeline, made: Cut, other: Side, sample: Sample, seed: int) -> dict[str, Any]:
    """Compare HARTS with flat, and flat with itself: in other microbatches, once more in the same ones, and with
    embeddings that are rounded otherwise.

    Two gradients are held at a time, beside the parameters.

    Args:
        pipeline: holds the model.
        made: both sides.
        other: the flat side in other microbatches.
        sample: positions whose logits are compared.
        seed: of the rounding.

    Returns:
        `faults`, `differences` of HARTS, `repacked`, `rerun` and `rounded` from flat, and `off_cosine` of these: one
        less the cosine of logits with those of flat, mean and most over the sample.
    """
    model = pipeline.env.model
    apart, off = {}, {}
    with fixed_order(model):
        flat = execute(pipeline, made.flat, sample)
        kept, wanted = [_kept(each, model) for _, _, each, _ in gradients(model)], logits(model, flat)
        runs = {
            "HARTS": partial(execute, pipeline, made.ours, sample),
            "repacked": partial(execute, pipeline, other, sample),
            "rerun": partial(execute, pipeline, made.flat, sample),
            "rounded": partial(rounded, pipeline, made.flat, sample, seed),
        }
        for name, run in runs.items():
            found = run()
            apart[name] = difference(model, kept, found, flat)
            off[name] = off_cosine(logits(model, found), wanted, model.total)
    model.module.zero_grad(set_to_none=True)
    return {
        "faults": faults(apart["HARTS"], spread(apart, off), pipeline.env.dtype) + cosine_faults(off),
        "loss": flat.loss,
        "differences": {name: each.told() for name, each in apart.items()},
        "off_cosine": off,
        "samples": len(sample.key),
    }


def spread(apart: dict[str, Difference], off: dict[str, dict[str, float]]) -> list[Difference]:
    """Runs of flat that tell how far from it HARTS may be: where logits have the same bits, rounding explains nothing.

    Args:
        apart: of each run from flat.
        off: 1 - cosine of its logits.
    """
    names = ["repacked", "rerun"] + ["rounded"] * (off["HARTS"]["most"] > 0)
    return [apart[name] for name in names]


def _kept(gradient: Tensor | None, model: Model) -> Tensor | None:
    """A gradient that the next pass does not change: `grad` is let go of, buffers of Megatron are filled again."""
    return gradient if gradient is None or getattr(model, "parallel", None) is None else gradient.clone()


def difference(model: Model, kept: list[Tensor | None], found: Found, flat: Found) -> Difference:
    """Compare a run, whose gradients the model holds, with the flat one, whose gradients were kept; alike on every
    process."""
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
        _relative(abs(found.loss - flat.loss), abs(flat.loss)),
        _relative(math.sqrt(apart), math.sqrt(size)),
        worst,
        _farness(*squares[worst]),
        _relative(math.sqrt(squares[worst][1]), math.sqrt(size)),
        {name: _farness(*each) for name, each in squares.items()},
        *_of_routers(found.routers, flat.routers),
    )


def _of_routers(found: Tensor, flat: Tensor) -> tuple[float, float]:
    """`Difference.router_z` and `Difference.moved`; an assignment that is another one counts at both experts."""
    apart = (found - flat).abs()
    moved = _relative(float(apart[1:].sum()) / 2, float(flat[1:].sum()))
    return _relative(float(apart[0]), float(flat[0])), moved


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


def faults(ours: Difference, spread: Sequence[Difference], dtype: torch.dtype) -> list[str]:
    """Why parity does not hold, one sentence each; a NaN is a fault.

    Args:
        ours: of HARTS from flat.
        spread: of flat from itself.
        dtype: of the model.
    """
    wide = dtype in TOLERANCE
    of_loss = LOSS if wide else NARROW_LOSS
    found = _beyond("loss", ours.loss, of_loss)
    of_z = _allowed(SPREAD, MOST, [each.router_z for each in spread], of_loss)
    of_moved = _allowed(SPREAD, MOST, [each.moved for each in spread], MOVED)
    found += _beyond("statistic z of routers", ours.router_z, of_z)
    found += _beyond("assignments of experts", ours.moved, of_moved)
    if wide:
        return found + _beyond("gradient", ours.gradient, TOLERANCE[dtype], ours.worst)
    found += _beyond("gradient", ours.gradient, _allowed(SPREAD, MOST, [each.gradient for each in spread]), ours.worst)
    of_one = []
    for name, value in ours.parameters.items():
        limit = _allowed(SPREAD_OF_ONE, MOST_OF_ONE, [each.parameters[name] for each in spread])
        of_one += _beyond(f"gradient of {name}", value, limit)
    more = [f"{len(of_one) - NAMED} more parameters' gradients are too far off"] if len(of_one) > NAMED else []
    return found + of_one[:NAMED] + more


def cosine_faults(off: dict[str, dict[str, float]]) -> list[str]:
    """Why parity does not hold, of what `off_cosine` found in each run: logits are farther from flat's than rounding
    takes its own."""
    limit = max(COSINE, SPREAD * max(each["mean"] for name, each in off.items() if name != "HARTS"))
    value = off["HARTS"]["mean"]
    return [] if value <= limit else [f"logits: 1 - cosine is {value:.1e} on average, allowed is {limit:.1e}"]


def _allowed(times: float, most: float, spread: Sequence[float], least: float = NARROW) -> float:
    return min(most, max(least, times * max((each for each in spread if math.isfinite(each)), default=0.0)))


def _beyond(name: str, value: float, limit: float, worst: str = "") -> list[str]:
    if value <= limit:
        return []
    return [
        f"{name}: differs by a relative {value:.1e}, allowed is {limit:.1e}" + (f"; worst is {worst}" if worst else "")
    ]
