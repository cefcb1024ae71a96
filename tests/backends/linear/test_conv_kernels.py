from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.linear.conv import short_conv
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from harts.stages.call_plan.min_call import MinCall
from harts.stages.call_plan.per_segment import PerSegment
from harts.stages.layout.round_major import RoundMajor
from tests.backends.linear.calls import error
from tests.backends.linear.trees import (
    CHUNK,
    DEEP,
    layout_of,
    plan_of,
    semantic_rows,
    trajectory_offsets,
)
from tests.forests import paths_of, random_trajectories, tree_of

pytest.importorskip("triton")

from harts.backends.linear.conv_fused import fused_conv

GPU = pytest.mark.gpu
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CallPlan = type[MinCall] | type[PerSegment]
ROUNDING = {F32: 2e-6, F16: 2**-11, BF16: 2**-8}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN until they are written, and operations that are not deterministic raise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs triton's interpreter (TRITON_INTERPRET=1)")
    return name


class Run(NamedTuple):
    y: Tensor
    dx: Tensor
    dweight: Tensor


def conv(x: Tensor, weight: Tensor, plan: PlanTensors) -> Tensor:
    """Kernels: on a GPU through the door; float64 is the oracle in torch, on the host."""
    return short_conv(x, weight, plan) if x.is_cuda or x.dtype == torch.float64 else fused_conv(x, weight, plan)


def run(x: Tensor, weight: Tensor, plan: PlanTensors, dy: Tensor) -> Run:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = conv(x, weight, plan)
    return Run(y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def draw(*shape: int, seed: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def plan_on(device: str, layout: CompactLayout) -> PlanTensors:
    return build_plan_tensors(layout, device, F32)


def padded_layout(seed: int, width: int) -> CompactLayout:
    """Padding begins inside a block of rows."""
    rng = random.Random(seed)
    trajectories = random_trajectories(rng, CHUNK, rng.randint(1, 3), rng.randint(2, 6))
    return layout_of(trajectories, width, row_multiple=48)


def assert_same_bits(found: Run, wanted: Run) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def assert_equals_float64(layout: CompactLayout, channels: int, dtype: torch.dtype, device: str) -> None:
    rows, width = len(layout.input_ids), layout.context_row.shape[1] + 1
    x, dy = draw(rows, channels, seed=1).to(dtype), draw(rows, channels, seed=2).to(dtype)
    weight = draw(channels, width, seed=3).to(dtype)
    found = run(x.to(device), weight.to(device), plan_on(device, layout), dy.to(device))
    wanted = run(x.double(), weight.double(), plan_of(layout), dy.double())
    assert [each.dtype for each in found] == [dtype] * 3
    assert (
        max(error(*(each.cpu().double() for each in pair)) for pair in zip(found, wanted, strict=True))
        < ROUNDING[dtype]
    )
    assert not found.y[layout.rows :].any()
    assert not found.dx[layout.rows :].any()


@pytest.mark.parametrize("dtype", [F32, F16, pytest.param(BF16, marks=GPU)])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_float64_path_on_forests(seed: int, width: int, dtype: torch.dtype, device: str) -> None:
    if dtype == BF16 and device == "cpu":
        pytest.skip("triton's interpreter has no bfloat16")
    assert_equals_float64(padded_layout(10 * seed + width, width), (5, 64, 200)[seed], dtype, device)


def test_one_row_of_one_channel(device: str) -> None:
    assert_equals_float64(layout_of([[1]]), 1, F32, device)


def test_sequences_shorter_than_the_window(device: str) -> None:
    short = [(-1, 1), (0, 1), (0, 1), (1, 1), (1, 1), (3, 1), (3, 2), (5, 1), (5, 1), (-1, 1), (-1, 2)]
    assert_equals_float64(layout_of(paths_of(short), 8), 3, F32, device)


def test_a_row_with_thousands_of_users(device: str) -> None:
    layout = layout_of([[1, 2, 3, 4 + child] for child in range(2000)], 3)
    assert layout.rows == 2003
    assert_equals_float64(layout, 2, F32, device)


def test_thousands_of_trees_of_one_token(device: str) -> None:
    layout = layout_of([[token] for token in range(2000)], 2)
    assert layout.rows == 2000
    assert_equals_float64(layout, 2, F32, device)


@pytest.mark.parametrize("dtype", [F16, pytest.param(BF16, marks=GPU)])
def test_narrow_results_are_those_of_float32_rounded_once(dtype: torch.dtype, device: str) -> None:
    if dtype == BF16 and device == "cpu":
        pytest.skip("triton's interpreter has no bfloat16")
    layout = padded_layout(4, 4)
    plan, rows = plan_on(device, layout), len(layout.input_ids)
    x, dy, weight = (draw(*shape, seed=5, dtype=dtype, device=device) for shape in ((rows, 7), (rows, 7), (7, 4)))
    found, wide = run(x, weight, plan, dy), run(x.float(), weight.float(), plan, dy.float())
    assert_same_bits(found, Run(*(each.to(dtype) for each in wide)))


def test_a_wide_weight_keeps_its_dtype(device: str) -> None:
    layout = layout_of(DEEP)
    rows = len(layout.input_ids)
    x, dy = draw(rows, 6, seed=1, dtype=F16, device=device), draw(rows, 6, seed=2, dtype=F16, device=device)
    weight = draw(6, 4, seed=3, device=device)
    found = run(x, weight, plan_on(device, layout), dy)
    assert [each.dtype for each in found] == [F16, F16, F32]
    wanted = run(x.double().cpu(), weight.double().cpu(), plan_of(layout), dy.double().cpu())
    assert error(found.dweight.double().cpu(), wanted.dweight) < ROUNDING[F32]


@pytest.mark.parametrize("seed", range(3))
def test_each_trajectory_alone_gives_the_same_bits(seed: int, device: str) -> None:
    rng = random.Random(seed)
    trajectories = random_trajectories(rng, CHUNK, 2, 4)
    layout = layout_of(trajectories)
    x, weight = draw(layout.rows, 7, seed=1, device=device), draw(7, 4, seed=2, device=device)
    rows = semantic_rows(layout).to(device)
    found = conv(x, weight, plan_on(device, layout))[rows]
    bounds = trajectory_offsets(layout)
    for index, tokens in enumerate(trajectories):
        mine = slice(bounds[index], bounds[index + 1])
        alone = conv(x[rows[mine]], weight, plan_on(device, layout_of([tokens])))
        assert torch.equal(alone, found[mine])


class Forest(NamedTuple):
    """The same two trees, packed in some order."""

    layout: CompactLayout
    rows: Tensor
    """Compact row of each semantic position, those of tree 0 first, [S]."""
    inputs: tuple[Tensor, Tensor]
    """x and dy, [R, D]."""


def forest(first_tokens: tuple[int, ...], seed: int = 0, channels: int = 7, call_plan: CallPlan = MinCall) -> Forest:
    """Trees are packed in the order of their first tokens; any subset of the two trees, by what tokens are given."""
    trees = [random_trajectories(random.Random(seed + tree), CHUNK, 1, 4) for tree in range(len(first_tokens))]
    tree = tree_of([[first, *t[1:]] for first, tree in zip(first_tokens, trees, strict=True) for t in tree])
    plan = call_plan(call_plan.Config(chunk_size=CHUNK)).run(tree)
    layout = RoundMajor(RoundMajor.Config(conv_width=4, row_multiple=1)).run(plan)
    rows = semantic_rows(layout)
    # an input for each unique token, whatever row it has: by tree and place in its first trajectory
    values = draw(1000, 2 * channels, seed=9)[: len(rows)]
    first_use = torch.full((layout.rows,), len(rows)).scatter_reduce(0, rows, torch.arange(len(rows)), "amin")
    x, dy = values[first_use].split(channels, dim=1)
    return Forest(layout, rows, (x, dy))


def run_forest(built: Forest, device: str, dy: Tensor | None = None) -> Run:
    x, own_dy = built.inputs
    weight = draw(x.shape[1], 4, seed=3, device=device)
    return run(x.to(device), weight, plan_on(device, built.layout), (own_dy if dy is None else dy).to(device))


@pytest.mark.parametrize("call_plan", [MinCall, PerSegment])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_trees_changes_no_bit_of_a_row(seed: int, call_plan: CallPlan, device: str) -> None:
    one, other = (forest(tokens, seed, call_plan=call_plan) for tokens in ((100, 200), (200, 100)))
    assert not torch.equal(one.rows, other.rows)
    found, again, swapped = run_forest(one, device), run_forest(one, device), run_forest(other, device)
    assert_same_bits(again, found)
    mine, theirs = one.rows.to(device), other.rows.to(device)
    assert torch.equal(swapped.y[theirs], found.y[mine])
    assert torch.equal(swapped.dx[theirs], found.dx[mine])
    assert error(swapped.dweight, found.dweight) < ROUNDING[F32]


@pytest.mark.parametrize("tokens", [(100, 200), (200, 100)])
def test_trees_know_nothing_of_each_other(tokens: tuple[int, int], device: str) -> None:
    both, alone = forest(tokens), forest(tokens[:1])
    here, there = both.rows[: len(alone.rows)], both.rows[len(alone.rows) :]
    x, dy = both.inputs
    dy = dy.clone()
    dy[there] = 0
    found, wanted = run_forest(both, device, dy), run_forest(alone, device)
    assert torch.equal(found.y[here.to(device)], wanted.y[alone.rows.to(device)])
    assert torch.equal(found.dx[here.to(device)], wanted.dx[alone.rows.to(device)])
    assert not found.dx[there.to(device)].any()
    assert error(found.dweight, wanted.dweight) < ROUNDING[F32]
    x = x.clone()
    x[there] = torch.nan
    poisoned = run_forest(both._replace(inputs=(x, dy)), device)
    assert torch.equal(poisoned.y[here.to(device)], wanted.y[alone.rows.to(device)])
    assert torch.equal(poisoned.dx[here.to(device)], wanted.dx[alone.rows.to(device)])


def test_poison_on_padding_rows_leaks_nowhere(device: str) -> None:
    layout = padded_layout(3, 4)
    plan, rows = plan_on(device, layout), len(layout.input_ids)
    assert rows > layout.rows
    x, dy, weight = (draw(*shape, seed=6, device=device) for shape in ((rows, 7), (rows, 7), (7, 4)))
    wanted = run(x, weight, plan, dy)
    x[layout.rows :], dy[layout.rows :] = torch.nan, torch.nan
    assert_same_bits(run(x, weight, plan, dy), wanted)


def test_a_row_that_nobody_reads_changes_no_other_row(device: str) -> None:
    layout = layout_of(DEEP)
    plan = plan_on(device, layout)
    x, weight = draw(layout.rows, 7, seed=6, device=device), draw(7, 4, seed=7, device=device)
    wanted = conv(x, weight, plan)
    read = plan.conv_row[:-1].unique().tolist()
    unread = torch.tensor([row for row in range(layout.rows) if row not in read])
    assert len(unread) > 1
    x[unread.to(device)] = torch.nan
    found = conv(x, weight, plan).cpu()
    others = torch.from_numpy(np.setdiff1d(np.arange(layout.rows), unread.numpy()))
    assert found[unread].isnan().all()
    assert torch.equal(found[others], wanted.cpu()[others])


def test_strides_change_no_bit(device: str) -> None:
    layout = padded_layout(2, 4)
    plan, rows = plan_on(device, layout), len(layout.input_ids)
    x, dy, weight = (draw(*shape, seed=8, device=device) for shape in ((rows, 9), (rows, 9), (9, 4)))
    wanted = run(x, weight, plan, dy)

    def inside(x: Tensor) -> Tensor:
        """The same values as some of the columns of a larger tensor of NaN."""
        larger = torch.full((len(x), 20), torch.nan, device=device)
        larger[:, 4:13] = x
        return larger[:, 4:13]

    assert_same_bits(run(inside(x), weight, plan, inside(dy)), wanted)
    transposed = [each.T.contiguous().T for each in (x, weight, dy)]
    assert_same_bits(run(transposed[0], transposed[1], plan, transposed[2]), wanted)
    ones = torch.ones(rows, 9, device=device)
    expanded = torch.ones(1, 1, device=device).expand(rows, 9)
    assert_same_bits(run(x, weight, plan, expanded), run(x, weight, plan, ones))


def test_layers_share_the_table_of_users(device: str) -> None:
    layout = layout_of(DEEP)
    plan = plan_on(device, layout)
    x, dy, weight = (draw(*shape, seed=8, device=device) for shape in ((layout.rows, 3), (layout.rows, 3), (3, 4)))
    first = run(x, weight, plan, dy)

    def made_again() -> Tensor:
        raise AssertionError

    plan.once("conv_shared_rows", made_again)
    assert_same_bits(run(x, weight, plan, dy), first)


@pytest.mark.parametrize(
    ("dtype", "device", "fused"),
    [
        (torch.float64, "cpu", False),
        (F32, "cpu", False),
        pytest.param(torch.float64, "cuda", False, marks=GPU),
        pytest.param(F32, "cuda", True, marks=GPU),
        pytest.param(BF16, "cuda", True, marks=GPU),
    ],
    indirect=["device"],
)
def test_kernels_serve_gpus_up_to_float32(dtype: torch.dtype, device: str, fused: bool) -> None:
    layout = layout_of(DEEP)
    x, weight = draw(layout.rows, 3, seed=1, dtype=dtype, device=device), draw(3, 4, seed=2, dtype=dtype, device=device)
    y = short_conv(x.requires_grad_(), weight, plan_on(device, layout))
    assert ("FusedConv" in str(y.grad_fn)) == fused


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_more_elements_than_32_bits_can_count(device: str) -> None:
    rows, channels, few = 70_000, 32_768, 100
    big, small = (plan_on(device, layout_of([list(range(count))])) for count in (rows, 2 * few))
    assert rows * channels > 2**31
    x = torch.randn(rows, channels, dtype=BF16, device=device)
    dy = torch.randn(rows, channels, dtype=BF16, device=device)
    weight = torch.randn(channels, 4, dtype=BF16, device=device)
    found = run(x, weight, big, dy)
    wanted = run(x[-2 * few :], weight, small, dy[-2 * few :])
    assert torch.equal(found.y[-few:], wanted.y[-few:])
    assert torch.equal(found.dx[-few:], wanted.dx[-few:])
