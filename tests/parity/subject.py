"""The backend under conformance test: what it is asked to serve, its runs, and how their errors are judged.

Leaves are float64 tensors on the host that hold values of the tested dtype, so that every run, the float64 one too,
starts from the same numbers and sums gradients of shared rows without rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need
from harts.backends.build import able
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.plan_tensors import build_plan_tensors
from harts.ir import CompactLayout
from harts.registry import resolve
from tests.backends.linear.calls import error, packed_call, weighted_sum

CHUNKS = (8, 16, 32, 64, 128)
HEADS = ((2, 4), (2, 2), (1, 1))
HEAD_DIMS = ((6, 5), (16, 16), (32, 32), (64, 64), (128, 128))

OUTPUT, STATES = "outputs", "states"

Leaves = dict[str, Tensor]


class Run(NamedTuple):
    """What one way of running gives, in float64 on the host."""

    values: tuple[Tensor, ...]
    """Outputs; of a call, its states too."""
    gradients: Leaves


@dataclass(frozen=True)
class Subject:
    backend: LinearAttention
    need: Need
    oracle: LinearAttention
    """Serves the same rule in float64 on the host."""

    def leaves(self, rows: int, seed: int = 0) -> Leaves:
        drawn = self.backend.draw_inputs(rows, self.need, torch.Generator().manual_seed(seed))
        assert set(drawn) == set(self.backend.token_inputs)
        return {name: x.double().requires_grad_() for name, x in drawn.items()}

    def states(self, count: int, seed: int = 0) -> Tensor:
        """Leaf initial states, [count, HV, K, V]."""
        draw = torch.Generator().manual_seed(seed + 500)
        shape = (count, self.need.linear_heads[1], *self.need.linear_head_dims)
        return torch.randn(shape, generator=draw, dtype=torch.float32).double().requires_grad_()

    def inputs(self, leaves: Leaves) -> Leaves:
        """The leaves as a model hands them over: on the device, in the dtypes that the backend drew them in."""
        drawn = self.backend.draw_inputs(0, self.need, torch.Generator())
        return {name: x.to(self.need.device, drawn[name].dtype) for name, x in leaves.items()}

    def call(
        self, leaves: Leaves, initial: Tensor, lengths: Sequence[int], states: Sequence[tuple[int, int]] = ()
    ) -> tuple[Tensor, Tensor]:
        """One packed call of the backend: outputs and states, in float64 on the host."""
        packed = packed_call(self.need.chunk_size, [0, *itertools.accumulate(lengths)], states)
        start = initial.to(self.need.device, torch.promote_types(self.need.dtype, torch.float32))
        output, taken = self.backend.call(self.inputs(leaves), packed, start)
        assert output.shape == (len(leaves["v"]), *initial.shape[1:2], *initial.shape[3:])
        assert taken.shape == (len(states), *initial.shape[1:])
        assert wide_dtype(taken) == taken.dtype
        return output.cpu().double(), taken.cpu().double()

    def exact(self) -> Subject:
        """The oracle in this one's place."""
        return replace(self, backend=self.oracle, need=replace(self.need, device="cpu", dtype=torch.float64))

    def apart(
        self, leaves: Leaves, initial: Tensor, lengths: Sequence[int], states: Sequence[tuple[int, int]] = ()
    ) -> tuple[Tensor, Tensor]:
        """What `call` must give: every sequence alone, and every state as the last of a sequence that ends there."""
        bounds = [0, *itertools.accumulate(lengths)]
        outputs, taken = [], [initial.new_zeros(0, *initial.shape[1:])]
        for index, (begin, end) in enumerate(pairwise(bounds)):
            outputs.append(self.call(cut(leaves, begin, end), initial[index : index + 1], [end - begin])[0])
        for index, offset in states:
            start, begin = initial[index : index + 1], bounds[index]
            rows = cut(leaves, begin, begin + offset)
            taken.append(self.call(rows, start, [offset], [(0, offset)])[1] if offset else start)
        return torch.cat(outputs), torch.cat(taken)

    def uncut(
        self, leaves: Leaves, initial: Tensor, lengths: Sequence[int], states: Sequence[tuple[int, int]] = ()
    ) -> tuple[Tensor, Tensor]:
        """As `apart`, in one call, since an interpreted kernel takes seconds for each: the baseline of rounding."""
        bounds = [0, *itertools.accumulate(lengths)]
        cuts = [(index, offset) for index, offset in states if offset]
        rows = torch.cat([torch.arange(bounds[i], bounds[i] + n) for i, n in [*enumerate(lengths), *cuts]])
        start = torch.cat([initial, *(initial[i : i + 1] for i, _ in cuts)])
        wanted = [(len(lengths) + place, offset) for place, (_, offset) in enumerate(cuts)]
        several = [*lengths, *(offset for _, offset in cuts)]
        output, taken = self.call({name: x[rows] for name, x in leaves.items()}, start, several, wanted)
        ends = iter(taken)
        found = [next(ends) if offset else initial[index] for index, offset in states]
        return output[: bounds[-1]], torch.stack(found) if found else taken

    def executions(self) -> list[Callable[[Leaves, CompactLayout], Tensor]]:
        """Ways to run a plan: the backend's own, and the rounds if that is another."""
        own = type(self.backend).mix is not LinearAttention.mix
        return [self.mix, self.rounds] if own else [self.mix]

    def mix(self, leaves: Leaves, layout: CompactLayout) -> Tensor:
        """Outputs of all compact rows, [R, HV, V]."""
        return self._run(self.backend.mix, leaves, layout)

    def rounds(self, leaves: Leaves, layout: CompactLayout) -> Tensor:
        """The same by one call a round, whatever the backend's own way is."""
        return self._run(lambda inputs, plan: LinearAttention.mix(self.backend, inputs, plan), leaves, layout)

    def _run(self, mix: Callable[..., Tensor], leaves: Leaves, layout: CompactLayout) -> Tensor:
        wide = torch.promote_types(self.need.dtype, torch.float32)
        return mix(self.inputs(leaves), build_plan_tensors(layout, self.need.device, wide)).cpu().double()

    def check(self, found: Sequence[Run], baseline: Sequence[Run], exact: Sequence[Run], allowed: float = 1.1) -> None:
        """Judge runs, all of one size list, together.

        In float64 each quantity is within 1e-10 of the exact one. In less, its error over all runs is at most `allowed`
        times what an uninterrupted run of the backend makes, joined (root of the sum of squares) with the error of
        rounding the exact result once: sharing sums gradients before they are rounded, and the baseline after.
        """
        ours, plain, truth = (named(runs) for runs in (found, baseline, exact))
        for name, wanted in truth.items():
            if self.need.dtype == torch.float64:
                apart = max(error(a, b) for a, b in zip(ours[name], wanted, strict=True))
                assert apart <= 1e-10, f"{name}: off by a relative {apart:.1e}"
            else:
                whole = flat(wanted)
                of_ours, of_plain = (error(flat(x[name]), whole) for x in (ours, plain))
                rounding = error(whole.to(self.dtypes()[name]).double(), whole)
                limit = allowed * math.hypot(of_plain, rounding)
                assert of_ours <= limit, f"{name}: off by {of_ours:.3e}, allowed is {limit:.3e}"

    def dtypes(self) -> dict[str, torch.dtype]:
        """In which the backend gives each quantity of a run."""
        wide = torch.promote_types(self.need.dtype, torch.float32)
        drawn = {
            **self.backend.draw_inputs(0, self.need, torch.Generator()),
            "initial_state": torch.empty(0, dtype=wide),
        }
        return {OUTPUT: self.need.dtype, STATES: wide} | {gradient(name): x.dtype for name, x in drawn.items()}


def make(name: str, rule: str, device: str, dtype: torch.dtype) -> Subject:
    """A registered backend with the smallest shapes that it serves; fails the test if it serves none."""
    cls = resolve("linear_attention", name)
    backend: LinearAttention = cls(cls.Config())
    needs = [
        Need(device, dtype, rule, chunk, 4, heads, dims, (1, 1), (8, 8))
        for dims, chunk, heads in itertools.product(HEAD_DIMS, CHUNKS, HEADS)
    ]
    served = [need for need in needs if not backend.why_not(need)]
    if not served:
        pytest.fail(f"{name} serves none of the suite's needs; of the last: {'; '.join(backend.why_not(needs[-1]))}")
    need, one_head = served[0], replace(served[0], linear_heads=HEADS[-1])
    if emulated(need) and one_head in served:  # more heads are among the variations of calls
        need = one_head
    wide = replace(need, device="cpu", dtype=torch.float64)
    for each in ("recurrent", name):
        oracle = resolve("linear_attention", each)
        if not oracle(oracle.Config()).why_not(wide):
            break
    else:
        known = able("linear_attention", wide)
        if not known:
            pytest.fail(f"no registered backend serves the rule {rule!r} in float64 on the host, as the oracle must")
        oracle = resolve("linear_attention", known[0])
    return Subject(backend, need, oracle(oracle.Config()))


def emulated(need: Need) -> bool:
    """Whether kernels are likely to run in an interpreter, in which each head of a forest takes seconds."""
    return need.device == "cpu" and need.chunk_size > 16


def cut(leaves: Leaves, begin: int, end: int) -> Leaves:
    return {name: x[begin:end] for name, x in leaves.items()}


def run(leaves: Leaves, *values: Tensor) -> Run:
    """Values and the gradients of a loss in which each of their numbers has its own weight."""
    names = list(leaves)
    found = torch.autograd.grad(
        weighted_sum(values), [leaves[name] for name in names], retain_graph=True, materialize_grads=True
    )
    return Run(tuple(x.detach() for x in values), dict(zip(names, found, strict=True)))


def named(runs: Sequence[Run]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for each in runs:
        quantities = dict(zip((OUTPUT, STATES), each.values, strict=False))
        quantities |= {gradient(name): x for name, x in each.gradients.items()}
        for name, x in quantities.items():
            found.setdefault(name, []).append(x)
    return found


def gradient(name: str) -> str:
    return f"gradient of {name}"


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])
