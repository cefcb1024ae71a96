"""Small forests in chunks of 64, their inputs, and what an operator gives on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from harts.backends.base import LinearAttention
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
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    gates = (shape.value_heads, shape.key_dim) if rule == "kda" else (shape.value_heads,)
    return {
        "q": normalize(normal(rows, shape.heads, shape.key_dim), dim=-1),
        "k": normalize(normal(rows, shape.heads, shape.key_dim), dim=-1),
        "v": normal(rows, shape.value_heads, shape.value_dim),
        "g": logsigmoid(normal(rows, *gates)) * 0.3,
        "beta": normal(rows, shape.value_heads).sigmoid(),
    }


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


def run(operator: LinearAttention, inputs: dict[str, Tensor], plan: PlanTensors, seed: int = 1) -> Result:
    """Outputs, and gradients of a random projection of the outputs of all tokens."""
    output = operator.mix(inputs, plan)
    draw = torch.Generator().manual_seed(seed)
    upstream = torch.randn(output.shape, generator=draw, dtype=torch.float64)
    upstream[plan.rows :] = 0.0
    gradients = torch.autograd.grad(output, list(inputs.values()), upstream.to(output))
    return Result(output.detach(), dict(zip(inputs, gradients, strict=True)))


def exact(inputs: dict[str, Tensor], layout: CompactLayout) -> Result:
    """The float64 oracle on the values that were given."""
    wide = {name: x.detach().cpu().double().requires_grad_() for name, x in inputs.items()}
    return run(Naive(Naive.Config()), wide, build_plan_tensors(layout, "cpu", torch.float64))
