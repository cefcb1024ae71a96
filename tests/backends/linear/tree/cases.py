"""Small forests in chunks of 64, their inputs, and what an operator gives on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need
from harts.backends.linear.inputs import delta_inputs
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from harts.registry import resolve
from harts.stages.call_plan.flat import Flat
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.layout.round_major import RoundMajor
from tests.forests import Spec, paths_of, tree_of

CHUNK = 64

FORKS: Spec = [(-1, 70), (0, 70), (0, 30), (1, 40), (1, 1), (2, 40), (2, 20)]
"""Forks inside chunks, a one-token branch; states cross rounds."""
BOUNDARIES: Spec = [(-1, 128), (0, 64), (0, 1), (1, 3), (1, 64)]
"""Forks on chunk boundaries, where nothing is replayed."""


@dataclass(frozen=True)
class Shape:
    """Heads and head dims of a case."""

    heads: int = 1
    value_heads: int = 2
    key_dim: int = 32
    value_dim: int = 16


def backend(name: str, **config: Any) -> LinearAttention:
    cls = resolve("linear_attention", name)
    built: LinearAttention = cls(cls.Config(**config))
    return built


def layout_of(trajectories: list[list[int]], row_multiple: int = 1, *, flat: bool = False) -> CompactLayout:
    tree = tree_of(trajectories)
    plan = Flat(Flat.Config(chunk_size=CHUNK)).run(tree) if flat else plan_rounds(tree, CHUNK)
    return RoundMajor(RoundMajor.Config(conv_width=4, row_multiple=row_multiple)).run(plan)


def layout_of_spec(spec: Spec, row_multiple: int = 1) -> CompactLayout:
    return layout_of(paths_of(spec), row_multiple)


def plan_of(layout: CompactLayout, device: str) -> PlanTensors:
    return build_plan_tensors(layout, device, torch.float32)


def random_inputs(rows: int, rule: str, shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Inputs in float64, on the host."""
    heads, dims = (shape.heads, shape.value_heads), (shape.key_dim, shape.value_dim)
    need = Need("cpu", torch.float64, rule, CHUNK, 4, heads, dims, (1, 1), (8, 8))
    return delta_inputs(rows, need, torch.Generator().manual_seed(seed))


def as_given(inputs: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """As a model hands them over: q, k, v in its dtype, gates and beta in float32; leaves on the device."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: x.to(device, dtype if name in {"q", "k", "v"} else wide).detach().requires_grad_()
        for name, x in inputs.items()
    }


@dataclass(frozen=True)
class Result:
    """Outputs and gradients of one run."""

    output: Tensor
    gradients: dict[str, Tensor]

    def errors(self, exact: Result) -> dict[str, float]:
        """Relative error of each tensor in the Frobenius norm."""
        mine = {"output": self.output, **self.gradients}
        theirs = {"output": exact.output, **exact.gradients}
        return {
            name: float((x.double().cpu() - theirs[name].double().cpu()).norm() / theirs[name].double().norm().cpu())
            for name, x in mine.items()
        }

    def same_bits(self, other: Result) -> bool:
        pairs = [(self.output, other.output), *((x, other.gradients[name]) for name, x in self.gradients.items())]
        return all(torch.equal(a, b) for a, b in pairs)


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """New tensors are NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_upstream(output: Tensor, rows: int, seed: int = 1) -> Tensor:
    """A gradient of outputs with strides of its own, as that of a transposed output has; zero past `rows`."""
    draw = torch.Generator().manual_seed(seed)
    count, value_heads, value_dim = output.shape
    upstream = torch.randn(value_heads, count, value_dim, generator=draw, dtype=torch.float64).transpose(0, 1)
    upstream[rows:] = 0.0
    return upstream.to(output)


def run(
    operator: LinearAttention, inputs: dict[str, Tensor], plan: PlanTensors, upstream: Tensor | None = None
) -> Result:
    """Outputs, and gradients of a random projection of the outputs of all tokens, or of the one that is given."""
    output = operator.mix(inputs, plan)
    given = random_upstream(output, plan.rows) if upstream is None else upstream.to(output)
    gradients = torch.autograd.grad(output, list(inputs.values()), given)
    return Result(output.detach(), dict(zip(inputs, gradients, strict=True)))


def exact(
    inputs: dict[str, Tensor], layout: CompactLayout, device: str = "cpu", upstream: Tensor | None = None
) -> Result:
    """The float64 oracle on the values that were given."""
    wide = {name: x.detach().to(device, torch.float64).requires_grad_() for name, x in inputs.items()}
    return run(Naive(Naive.Config()), wide, build_plan_tensors(layout, device, torch.float64), upstream)


def bits_of_trajectories(
    operator: LinearAttention, inputs: dict[str, Tensor], trajectories: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Outputs of all semantic positions: of the tree, and of every trajectory as a sequence of its own."""
    layout, flat = layout_of(trajectories), layout_of(trajectories, flat=True)
    device = inputs["v"].device
    rows, flat_rows = (torch.from_numpy(each.semantic_map.rows()).to(device) for each in (layout, flat))
    with torch.no_grad():
        tree = operator.mix({name: x[: layout.rows] for name, x in inputs.items()}, plan_of(layout, str(device)))
        # rows of the flat plan are in another order than semantic positions
        place = torch.empty_like(flat_rows).index_put((flat_rows,), torch.arange(len(rows), device=device))
        alone = operator.mix({name: x[rows[place]] for name, x in inputs.items()}, plan_of(flat, str(device)))
    return tree[rows], alone[flat_rows]


PREFIX = 21
"""Tokens that end inside a sub-chunk."""


def prefix_run(operator: LinearAttention, later: int, seed: int, dtype: torch.dtype, device: str) -> Result:
    """The first rows of a sequence that goes on for `later` random rows, under a loss on the first rows alone."""
    shape = Shape(1, 1, 128, 16)
    first, rest = random_inputs(PREFIX, "kda", shape), random_inputs(later, "kda", shape, seed)
    joined = {name: torch.cat([first[name], rest[name]]) for name in first}
    joined["g"] = -5.0 + (-joined["g"]).clamp(1e-3, 0.5)  # near the bound of a bounded gate
    upstream = random_upstream(first["v"], PREFIX)
    upstream = torch.cat([upstream, upstream.new_zeros(later, *upstream.shape[1:])])
    layout = layout_of([[1] * (PREFIX + later)])
    found = run(operator, as_given(joined, dtype, device), plan_of(layout, device), upstream)
    return Result(found.output[:PREFIX], {name: x[:PREFIX] for name, x in found.gradients.items()})
