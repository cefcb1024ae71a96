"""Trees and inputs that kernels are checked and tuned on, in the shapes that a model asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout, CompactTrie
from harts.registry import resolve
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.layout.round_major import RoundMajor
from harts.stages.schedule.segments import segment_tree
from harts.train.calibrate_shapes import Spec, batch

FORKS: Spec = [(-1, 128), (0, 70), (0, 1), (1, 40), (1, 20), (3, 5), (3, 1)]
"""A fork on a chunk boundary, two inside chunks, two one-token branches; states cross rounds."""
VOCABULARY = 1024
SEED = 0


@dataclass(frozen=True)
class Case:
    """One microbatch for a linear-attention backend."""

    layout: CompactLayout
    plan: PlanTensors
    inputs: dict[str, Tensor]
    """Leaves on the device, as a model hands them over."""
    upstream: Tensor
    """Gradient of the outputs, zeros on padding rows, [R, HV, V]."""


@dataclass(frozen=True)
class Result:
    """Outputs and gradients of one run."""

    tensors: dict[str, Tensor]
    """`output`, then the gradient of each input by its name."""

    def same_bits(self, other: Result) -> bool:
        """Whether all tensors are equal to the last bit."""
        return all(torch.equal(x, other.tensors[name]) for name, x in self.tensors.items())


def layout_of(spec: Spec, need: Need, row_multiple: int = 64) -> CompactLayout:
    """The tree of a spec as one microbatch, rows padded to a multiple."""
    rollouts = batch([spec], VOCABULARY, np.random.default_rng(SEED))
    ingest = resolve("ingest", "batch")
    trie: CompactTrie = ingest(ingest.Config()).run(rollouts)
    plan = plan_rounds(segment_tree(trie, np.arange(len(rollouts.columns.names))), need.chunk_size)
    return RoundMajor(RoundMajor.Config(conv_width=need.conv_width, row_multiple=row_multiple)).run(plan)


def tuning_spec(rows: int) -> Spec:
    """A tree of `rows` tokens: a trunk, four branches, and four branches of the first; forks lie inside chunks."""
    part = max(2, rows // 9)
    trunk = rows - 8 * part
    if trunk < 1:
        return [(-1, rows)]
    return [(-1, trunk), (0, part), (0, part), (0, part), (0, part), (1, part), (1, part), (1, part), (1, part)]


def case(backend: LinearAttention, need: Need, spec: Spec) -> Case:
    """A microbatch with random inputs; the same for equal arguments."""
    layout = layout_of(spec, need)
    draw = torch.Generator().manual_seed(SEED)
    inputs = backend.draw_inputs(len(layout.input_ids), need, draw)
    leaves = {name: x.to(need.device).requires_grad_() for name, x in inputs.items()}
    upstream = torch.randn(inputs["v"].shape, generator=draw, dtype=torch.float32)
    upstream[layout.rows :] = 0.0
    plan = build_plan_tensors(layout, need.device, torch.float32)
    return Case(layout, plan, leaves, upstream.to(need.device, need.dtype))


def run(backend: LinearAttention, given: Case) -> Result:
    """Outputs, and their gradients."""
    output = backend.mix(given.inputs, given.plan)
    gradients = torch.autograd.grad(output, list(given.inputs.values()), given.upstream.to(output.dtype))
    return Result({"output": output.detach()} | dict(zip(given.inputs, gradients, strict=True)))


def oracle(given: Case) -> Result:
    """What is exact of a delta rule: float64 on the same values and the same device."""
    wide = {name: x.detach().double().requires_grad_() for name, x in given.inputs.items()}
    return run(Naive(Naive.Config()), replace(given, inputs=wide))
