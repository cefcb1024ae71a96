"""The state recurrence by itself, on random rows, against the same recurrence in float64 under autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.linear.tree.gdn_chunks import GdnChunks
from harts.backends.linear.tree.grid import CHUNK
from harts.backends.linear.tree.kda_chunks import KdaChunks
from harts.backends.linear.tree.launch import KernelConfigs, Launcher
from harts.backends.linear.tree.rule import Rows, Rule
from harts.backends.linear.tree.schedule import Schedule, Sequences, build_schedule
from harts.backends.linear.tree.states import Recurrence

PRECISION = {
    "cpu": [(torch.float32, 2e-6), (torch.float16, 3e-3)],
    "cuda": [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
}
"""Dtype of rows, and the relative error of all that the kernels give; states before chunks are kept in that dtype."""
KERNEL = {"BV": 16, "num_warps": 4, "num_stages": 1}
CONFIGS = KernelConfigs("test", {f"{way}_states_kernel": {"default": KERNEL} for way in ("forward", "backward")})

SEQUENCES = Sequences(
    # a trunk; two branches that replay; one from a boundary; one from a given state; one more of the second state
    cu_rows=np.cumsum([0, 150, 70, 1, 5, 3, 66]),
    replay=np.array([0, 22, 10, 0, 0, 0]),
    replay_row=np.concatenate([np.arange(128, 150), np.arange(128, 138)]),
    source=np.array([-1, 2, 2, 1, 0, 2]),
    given=1,
    producer=np.array([0, 0, 0, 5]),
    produced_after=np.array([64, 128, 150, 66]),
)
"""Slot 0 is given; slot 1 has one consumer, slot 2 three; slots 3 and 4 are asked for from outside alone."""


@dataclass(frozen=True)
class Case:
    """Random arguments of both walks; in float64, with the values of the dtype of rows. One entry a buffer."""

    rule: Rule
    schedule: Schedule
    rows: list[Rows]
    gates: list[Tensor]
    do: list[Tensor]
    de: list[Tensor]
    given: Tensor
    dbank: Tensor

    def to(self, dtype: torch.dtype) -> tuple[list[Rows], list[Tensor], list[Tensor], list[Tensor]]:
        """Rows, gates, do and de as the kernels get them."""
        rows = [Rows(*(x.to(dtype) for x in each)) for each in self.rows]
        gates = [each.float() for each in self.gates]
        return rows, gates, [each.to(dtype) for each in self.do], [each.to(dtype) for each in self.de]


def random_case(scalar: bool, dims: tuple[int, int], dtype: torch.dtype, device: str) -> Case:
    draw = torch.Generator().manual_seed(dims[0] + dims[1])
    schedule = build_schedule(SEQUENCES, torch.device(device))
    assert schedule.heads is not None
    key_dim, value_dim = dims
    value_heads = 2
    heads = 1 if scalar else value_heads
    sizes = [schedule.body.rows, schedule.heads.grid.rows]

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        drawn = torch.randn(shape, generator=draw, dtype=torch.float64)
        return drawn.to(of).double().to(device)

    def key(size: int, count: int) -> Tensor:
        return (normal(size, count, key_dim) * key_dim**-0.5).to(dtype).double()

    launcher = Launcher(CONFIGS, dims)
    return Case(
        rule=GdnChunks(launcher) if scalar else KdaChunks(launcher, safe_gate=True),
        schedule=schedule,
        rows=[
            Rows(key(n, heads), key(n, heads), key(n, value_heads) / 8, normal(n, value_heads, value_dim))
            for n in sizes
        ],
        gates=[-normal(n, value_heads, *([] if scalar else [key_dim]), of=torch.float32).abs() for n in sizes],
        do=[normal(n, value_heads, value_dim) for n in sizes],
        de=[normal(n, value_heads, value_dim) for n in sizes],
        given=normal(1, value_heads, key_dim, value_dim, of=torch.float32),
        dbank=normal(schedule.slots, value_heads, key_dim, value_dim, of=torch.float32),
    )


@dataclass(frozen=True)
class Exact:
    """What the walks must give: by chunk, row, slot and place, a list a buffer."""

    states: list[dict[int, Tensor]]
    errors: list[dict[int, Tensor]]
    bank: dict[int, Tensor]
    dstates: list[dict[int, Tensor]]
    de: list[dict[int, Tensor]]
    dsource: dict[int, Tensor]


def exact(case: Case, *, outside: bool) -> Exact:
    """The recurrence, chunk by chunk; gradients of a loss whose gradients of outputs, errors and states are given."""
    before: list[dict[int, Tensor]] = [{}, {}]
    errors: list[dict[int, Tensor]] = [{}, {}]
    after: list[dict[int, Tensor]] = [{}, {}]
    bank, started = {0: case.given[0].clone().requires_grad_()}, {}
    loss = case.given.new_zeros(())
    zero = torch.zeros_like(case.given[0]).requires_grad_()
    for first, last, source, place in case.schedule.forward_order.tolist():
        state = zero
        if source >= 0:
            started[place] = state = bank[source] * 1.0  # a copy, whose gradient is the share of this consumer
        for side, row, end, chunk, slot in case.schedule.spans[first:last].tolist():
            for number, begin in enumerate(range(row, end, CHUNK), chunk):
                now = slice(begin, min(begin + CHUNK, end))
                before[side][number] = state
                e, output, state = step(case, side, now, state)
                errors[side][begin], after[side][number] = e, state
                loss = loss + (output * case.do[side][now]).sum() + (e * case.de[side][now]).sum()
            if slot >= 0:
                bank[slot] = state
                if outside:
                    loss = loss + (state * case.dbank[slot]).sum()
    return Exact(
        before,
        [by_row(each) for each in errors],
        bank,
        [gradients(loss, each) for each in after],
        [by_row(gradients(loss, each)) for each in errors],
        gradients(loss, started),
    )


def step(case: Case, side: int, now: slice, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors [t, HV, V], outputs through the state before the chunk, and the state after it [HV, K, V]."""
    q, k, w, u = (x[now] for x in case.rows[side])
    g = case.gates[side][now]
    value_heads = w.shape[1]
    q, k = (x.repeat_interleave(value_heads // x.shape[1], 1) for x in (q, k))
    last = g[-1]
    if case.rule.scalar_gate:
        q, k, last = q * g.exp2()[..., None], k * (last - g).exp2()[..., None], last[:, None]
    e = u - torch.einsum("thk,hkv->thv", w, state)
    output = torch.einsum("thk,hkv->thv", q, state) * case.rule.scale
    return e, output, last.exp2()[..., None] * state + torch.einsum("thk,thv->hkv", k, e)


def gradients(loss: Tensor, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    found = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


def by_row(chunks: dict[int, Tensor]) -> dict[int, Tensor]:
    """Rows of chunks that are named by their first row."""
    return {begin + i: row for begin, chunk in chunks.items() for i, row in enumerate(chunk)}


def apart(found: Tensor, wanted: dict[int, Tensor]) -> float:
    """Relative error of the rows of a tensor that are wanted."""
    index = list(wanted)
    told = torch.stack([wanted[i].detach() for i in index])
    return float((found[index].double() - told).norm() / told.norm())


def check(named: dict[str, tuple[Sequence[Tensor], Sequence[dict[int, Tensor]]]], allowed: float) -> None:
    errors = {
        f"{name} {side}": apart(*pair)
        for name, each in named.items()
        for side, pair in enumerate(zip(*each, strict=True))
    }
    assert max(errors.values()) < allowed, errors


@pytest.mark.parametrize("choice", [0, 1], ids=["precise", "half"])
@pytest.mark.parametrize("dims", [(16, 24), (40, 16), (64, 24)], ids=str)
@pytest.mark.parametrize("scalar", [True, False], ids=["gate a head", "gate a channel"])
def test_both_walks_equal_the_recurrence_and_its_gradients(scalar, dims, choice, device):
    dtype, allowed = PRECISION[device][choice]
    case = random_case(scalar, dims, dtype, device)
    rows, gates, do, de = case.to(dtype)
    walk = Recurrence(case.rule, case.schedule, rows, gates)
    bank = torch.full_like(case.dbank, torch.nan, dtype=torch.float32)
    bank[:1] = case.given
    walk.forward(bank, write=True)
    wanted = exact(case, outside=True)
    check(
        {
            "states": ([each.states for each in walk.walked], wanted.states),
            "errors": ([each.errors for each in walk.walked], wanted.errors),
            "bank": ([bank], [wanted.bank]),
        },
        allowed,
    )
    dstates, dsource = walk.backward(case.dbank.float(), do, de)
    check(
        {"dstates": (dstates, wanted.dstates), "de": (de, wanted.de), "dsource": ([dsource], [wanted.dsource])},
        allowed,
    )


@pytest.mark.parametrize("scalar", [True, False], ids=["gate a head", "gate a channel"])
def test_without_gradients_from_outside_only_consumers_count(scalar, device):
    dtype, allowed = PRECISION[device][0]
    case = random_case(scalar, (16, 16), dtype, device)
    rows, gates, do, de = case.to(dtype)
    walk = Recurrence(case.rule, case.schedule, rows, gates)
    walk.forward(torch.cat([case.given, torch.zeros_like(case.dbank[1:])]).float(), write=True)
    dstates, dsource = walk.backward(None, do, de)
    wanted = exact(case, outside=False)
    check({"dstates": (dstates, wanted.dstates), "dsource": ([dsource], [wanted.dsource])}, allowed)


@pytest.mark.parametrize("scalar", [True, False], ids=["gate a head", "gate a channel"])
def test_a_walk_from_a_full_bank_gives_the_same_bits_and_leaves_the_bank(scalar, device):
    dtype, _ = PRECISION[device][1]
    case = random_case(scalar, (40, 24), dtype, device)
    rows, gates, *_ = case.to(dtype)
    first, again = (Recurrence(case.rule, case.schedule, rows, gates) for _ in range(2))
    bank = torch.cat([case.given, torch.zeros_like(case.dbank[1:])]).float()
    first.forward(bank, write=True)
    full = bank.clone()
    again.forward(bank, write=False)
    assert torch.equal(bank, full)
    covered = [chunked_rows(case.schedule, side) for side in range(2)]
    for side in range(2):
        assert torch.equal(first.walked[side].states, again.walked[side].states)
        assert torch.equal(first.walked[side].errors[covered[side]], again.walked[side].errors[covered[side]])


def chunked_rows(schedule: Schedule, side: int) -> Tensor:
    """Rows of a buffer that a chunk covers: errors of the others are never written."""
    spans = [span for span in schedule.spans.tolist() if span[0] == side]
    return torch.cat([torch.arange(row, end) for _, row, end, *_ in spans])
