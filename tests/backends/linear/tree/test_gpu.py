"""What only a GPU shows: real head dims in 16 bits, compiled code that repeats its bits, and sizes past 32 bits.

Most of the time is compilation, which `-n 8` spreads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from harts.backends.base import LinearAttention
from tests.backends.linear.calls import naive, packed_call
from tests.backends.linear.tree.cases import (
    CHUNK,
    Result,
    Shape,
    as_given,
    backend,
    bits_of_trajectories,
    exact,
    layout_of,
    layout_of_spec,
    memory_of_nan,
    plan_of,
    prefix_run,
    random_inputs,
    random_upstream,
    run,
)
from tests.forests import Spec, paths_of
from tests.parity.trees import rows_by_trajectory

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 1e-2, F16: 2e-3}
"""Relative error of outputs and gradients in the Frobenius norm."""

FOREST: Spec = [
    *[(-1, 500), (0, 130), (0, 30), (1, 40), (1, 1), (2, 300), (2, 20), (2, 2)],
    *[(-1, 77), (8, 1), (8, 64), (-1, 192), (11, 64), (11, 1)],
]
"""Two trees that fork inside chunks and one that forks on a boundary; one-token branches."""


@dataclass(frozen=True)
class Case:
    """One compilation of all kernels."""

    rule: str
    head_dims: tuple[int, int]
    group: int
    """Value heads of a query head."""
    dtype: torch.dtype = BF16
    safe_gate: bool = True

    def __str__(self) -> str:
        bound = "" if self.rule == "gdn" else "-bounded" if self.safe_gate else "-unbounded"
        return f"{self.rule}{bound}-{self.head_dims[0]}x{self.head_dims[1]}-group{self.group}-{self.dtype}"

    def operator(self, **config: object) -> LinearAttention:
        gate = {"safe_gate": self.safe_gate} if self.rule == "kda" else {}
        return backend(self.rule, **gate, **config)

    def inputs(self, rows: int, device: str) -> dict[str, Tensor]:
        shape = Shape(2, 2 * self.group, *self.head_dims)
        return as_given(random_inputs(rows, self.rule, shape), self.dtype, device)


HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (64, 128), (128, 64)]
CASES = [
    # both rules at all head dims; groups take turns, so that each rule has both
    *(Case("kda", dims, 1 + i % 2) for i, dims in enumerate(HEAD_DIMS)),
    *(Case("gdn", dims, 2 - i % 2) for i, dims in enumerate(HEAD_DIMS)),
    Case("kda", (96, 96), 2, safe_gate=False),
    Case("kda", (128, 128), 1, safe_gate=False),
    Case("kda", (128, 128), 2, F16),
    Case("kda", (64, 64), 1, F16, safe_gate=False),
    Case("gdn", (128, 128), 2, F16),
]
USUAL = [Case("kda", (128, 128), 1), Case("kda", (128, 128), 1, safe_gate=False), Case("gdn", (128, 128), 2)]
SMALL = [Case("kda", (16, 16), 1), Case("gdn", (16, 16), 1)]

MANY = 70_000
"""More than 65,535, which is all that the second and the third axis of a launch hold."""
SAMPLE = [0, 1, 40_000, 65_534, 65_535, 65_536, 65_537, MANY - 1]

BRANCHES = 5_000
LONG = 110_000
"""Tokens of a trajectory; ten of them in 16 heads of 128 channels are more than 2 ** 31 elements."""


@pytest.fixture(scope="module")
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def memory_is_returned() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()  # to tests of other processes


def check(found: Result, wanted: Result, allowed: float) -> None:
    errors = found.errors(wanted)
    assert max(errors.values()) < allowed, errors


def forest_result(case: Case, device: str, **config: object) -> Result:
    layout = layout_of_spec(FOREST)
    return run(case.operator(**config), case.inputs(layout.rows, device), plan_of(layout, device))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_float64(case, device):
    layout = layout_of_spec(FOREST, row_multiple=64)
    assert layout.rows < len(layout.input_ids)
    inputs = case.inputs(len(layout.input_ids), device)
    found = run(case.operator(), inputs, plan_of(layout, device))
    check(found, exact(inputs, layout, device), TOLERANCE[case.dtype])
    assert not found.output[layout.rows :].any()
    assert not any(x[layout.rows :].any() for x in found.gradients.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_have_the_bits_of_each_trajectory_by_itself_and_of_the_rounds(case, device):
    layout = layout_of_spec(FOREST)
    inputs = case.inputs(layout.rows, device)
    tree, alone = bits_of_trajectories(case.operator(), inputs, paths_of(FOREST))
    assert torch.equal(tree, alone)
    plan = plan_of(layout, device)
    with torch.no_grad():
        fused, rounds = (case.operator(execution=each).mix(inputs, plan) for each in ("fused", "rounds"))
    assert torch.equal(fused, rounds)


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_gradients_of_the_rounds_equal_float64(case, device):
    layout = layout_of_spec(FOREST)
    inputs = case.inputs(layout.rows, device)
    found = run(case.operator(execution="rounds"), inputs, plan_of(layout, device))
    check(found, exact(inputs, layout, device), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_thirty_runs_have_the_same_bits_whether_states_are_kept_or_walked_again(case, device):
    first = forest_result(case, device)
    for number in range(30):
        assert first.same_bits(forest_result(case, device, keep_states=number % 2 == 1)), f"run {number}"


@pytest.mark.parametrize("execution", ["fused", "rounds"])
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_the_host_does_not_wait_inside_a_layer(case, execution, device):
    layout = layout_of_spec(FOREST)
    plan, inputs, operator = (
        plan_of(layout, device),
        case.inputs(layout.rows, device),
        case.operator(execution=execution),
    )

    def layer() -> None:
        output = operator.mix(inputs, plan)
        torch.autograd.grad(output, list(inputs.values()), torch.ones_like(output))

    layer()  # makes what all layers of a plan share
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_what_free_memory_holds_reaches_nothing(case, device):
    first = forest_result(case, device)
    with memory_of_nan():
        assert first.same_bits(forest_result(case, device))


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_gradients_of_outputs_may_have_strides(case, device):
    layout = layout_of_spec(FOREST)
    inputs, plan = case.inputs(layout.rows, device), plan_of(layout, device)
    transposed = random_upstream(inputs["v"], layout.rows)
    assert not transposed.is_contiguous()
    expanded = transposed[:, :1, :1].expand(inputs["v"].shape)
    for upstream in (transposed, expanded):
        found, wanted = (run(case.operator(), inputs, plan, each) for each in (upstream, upstream.contiguous()))
        assert found.same_bits(wanted)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("later", "seed"), [(1, 1), (1, 2), (11, 3), (43, 4), (200, 5)])
def test_later_tokens_change_no_bit_of_earlier_outputs_and_gradients(later, seed, dtype, device):
    operator = backend("kda", safe_gate=True)
    alone = prefix_run(operator, 0, 0, dtype, device)
    assert alone.same_bits(prefix_run(operator, later, seed, dtype, device))


@pytest.mark.parametrize("case", [Case("kda", (64, 64), 1), Case("gdn", (64, 64), 2)], ids=str)
def test_thousands_of_one_token_branches_equal_float64(case, device):
    layout = layout_of_spec([(-1, 65), *[(0, 1)] * BRANCHES])
    inputs = case.inputs(layout.rows, device)
    found = run(case.operator(), inputs, plan_of(layout, device))
    check(found, exact(inputs, layout, device), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_more_trajectories_than_a_launch_axis_holds(case, device):
    layout = layout_of([[token] for token in range(1, MANY + 1)])
    inputs = case.inputs(layout.rows, device)
    upstream = random_upstream(inputs["v"], layout.rows)
    found = run(case.operator(), inputs, plan_of(layout, device), upstream)
    wanted = exact(rows_of(inputs, SAMPLE), layout_of([[1 + i] for i in range(len(SAMPLE))]), device, upstream[SAMPLE])
    gradients = {name: x[SAMPLE] for name, x in found.gradients.items()}
    # a zero state has nothing to decay: what is left of this gradient is rounding
    assert float(gradients.pop("g").norm()) < TOLERANCE[case.dtype] * float(gradients["k"].norm())
    check(Result(found.output[SAMPLE], gradients), wanted, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_more_sequences_of_one_call_than_a_launch_axis_holds(case, device):
    inputs = case.inputs(MANY, device)
    given = torch.randn(MANY, 2, 16, 16, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
    packed = packed_call(CHUNK, range(MANY + 1), [(n, 1) for n in SAMPLE])
    upstream = random_upstream(inputs["v"], MANY)
    dstates = torch.randn(len(SAMPLE), 2, 16, 16, generator=torch.Generator().manual_seed(4)).to(device)
    found = call_result(case.operator(), inputs, packed, given, upstream, dstates)
    few = {name: x.double().requires_grad_() for name, x in rows_of(inputs, SAMPLE).items()}
    some = packed_call(CHUNK, range(len(SAMPLE) + 1), [(n, 1) for n in range(len(SAMPLE))])
    start = given.detach()[SAMPLE].double().requires_grad_()
    wanted = call_result(naive(), few, some, start, upstream[SAMPLE].double(), dstates.double())
    sampled = {name: x if name == "states" else x[SAMPLE] for name, x in found.gradients.items()}
    check(Result(found.output[SAMPLE], sampled), wanted, TOLERANCE[case.dtype])


def call_result(operator, inputs, packed, given, upstream, dstates) -> Result:  # noqa: PLR0917
    output, states = operator.call(inputs, packed, given)
    leaves = {**inputs, "initial_state": given}
    gradients = torch.autograd.grad([output, states], list(leaves.values()), [upstream, dstates])
    return Result(output.detach(), {"states": states.detach(), **dict(zip(leaves, gradients, strict=True))})


def rows_of(inputs: dict[str, Tensor], rows: list[int] | Tensor) -> dict[str, Tensor]:
    """A copy of some rows as leaves."""
    return {name: x.detach()[rows].requires_grad_() for name, x in inputs.items()}


def test_rows_past_the_elements_that_32_bits_count_have_the_bits_of_their_tree_alone(device):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 100:
        pytest.skip(f"needs 100 GiB of free GPU memory, {free:.0f} are")
    paths = paths_of([*[(-1, LONG)] * 10, (9, 70), (9, 3)])
    layout, alone = layout_of(paths), layout_of(paths[-2:])
    row = torch.empty(alone.rows, dtype=torch.int64)
    row[torch.cat(rows_by_trajectory(alone))] = torch.cat(rows_by_trajectory(layout)[-2:])
    assert int(row.max()) * 16 * 128 > 2**31
    # q and k alone are that large for kda, whose backward pass in float32 would not fit with v of that size
    for rule, head_dims in (("gdn", (128, 128)), ("kda", (128, 16))):
        operator = Case(rule, head_dims, 1).operator()
        inputs = drawn_on(device, layout.rows, rule, Shape(16, 16, *head_dims))
        upstream = torch.randn_like(inputs["v"])
        found = run(operator, inputs, plan_of(layout, device), upstream)
        few = rows_of(inputs, row.to(device))
        wanted = run(operator, few, plan_of(alone, device), upstream[row.to(device)])
        assert torch.equal(found.output[row.to(device)], wanted.output)
        mine = Result(wanted.output, {name: x[row.to(device)] for name, x in found.gradients.items()})
        check(mine, wanted, 1e-4)
        del inputs, upstream, found, few, wanted, mine
        torch.cuda.empty_cache()


def drawn_on(device: str, rows: int, rule: str, shape: Shape) -> dict[str, Tensor]:
    """Leaves as `as_given` of `random_inputs`, drawn where they are needed."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(rows, *size, generator=draw, device=device, dtype=BF16)

    def uniform(*size: int) -> Tensor:
        return torch.rand(rows, shape.value_heads, *size, generator=draw, device=device)

    inputs = {name: normal(shape.heads, shape.key_dim) for name in ("q", "k")}
    for x in inputs.values():
        x.div_(x.norm(dim=-1, keepdim=True))
    inputs["v"] = normal(shape.value_heads, shape.value_dim)
    inputs["g"] = uniform(*([shape.key_dim] if rule == "kda" else [])).mul_(-0.3)
    inputs["beta"] = uniform()
    return {name: x.requires_grad_() for name, x in inputs.items()}
