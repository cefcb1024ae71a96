"""What only a GPU shows of full attention: the libraries' own kernels, at real heads and head dims.

Every forest has a branch that is longer than a tile, so that one compilation of a kernel serves all tests.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.backends.base import FullAttention, Need
from harts.backends.build import refusals
from harts.backends.full import flash_attention_4, packed, transformer_engine, varlen
from harts.backends.full.expand import expand
from harts.backends.full.packed import import_faults
from harts.backends.full.visibility import Passes, read_visibility
from harts.backends.plan_tensors import AttentionViews
from harts.registry import resolve
from tests.backends.full.forests import THREE_LEVELS, Branches, dense, parents, random_branches, views_of, visibility
from tests.backends.full.packed_fakes import need

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SHAPES = {"mha": (16, 16, 128, 128), "gqa": (16, 2, 128, 128), "mla": (16, 16, 192, 128)}
"""H, G, Dk, Dv."""
PACKAGES = {
    "varlen": (varlen.MODULE, "torch"),
    "flash_attention_4": (flash_attention_4.MODULE, "fa4"),
    "transformer_engine": (transformer_engine.MODULE, "te"),
    "tree": (flash_attention_4.MODULE, "fa4"),
}
LONG = (-1, 261)

DEEP = [(-1, 3), (2, 1), (3, 1), (4, 1), (5, 2), (7, 1), (8, 1), (9, 1), (10, 1), (4, 1), (1, 1), (1, 1), (12, 3), LONG]
"""Nodes of one token, ten levels deep; one root of them forks twice at one row."""
FORESTS: dict[str, Branches] = {
    "three levels": [*THREE_LEVELS, LONG],
    "deep": DEEP,
    "random 1": [*random_branches(random.Random(1)), LONG],
    "random 2": [*random_branches(random.Random(2)), LONG],
    "behind most": [(-1, 700), (300, 130), (699, 1), (830, 64), (0, 2)],
    "behind a long one": [LONG, (200, 130), (260, 1), (390, 1), (391, 64), (0, 2), (130, 128)],
}


@dataclass(frozen=True)
class Case:
    """A backend with its config."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *self.config])

    def backend(self) -> FullAttention:
        """The backend; skips where its package is missing."""
        reasons = import_faults(*PACKAGES[self.name])
        if reasons:
            pytest.skip(reasons[0])
        cls = resolve("full_attention", self.name)
        built: FullAttention = cls(cls.Config(**self.config))
        return built


CASES = [
    Case("varlen"),
    Case("flash_attention_4"),
    Case("flash_attention_4", {"deterministic": True}),
    Case("transformer_engine"),
    Case("tree"),
]


@pytest.fixture(scope="module")
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def memory_is_returned() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()  # to tests of other processes


def need_of(shape: tuple[int, ...], device: str) -> Need:
    return need(device=device, dtype=BF16, full_heads=shape[:2], full_head_dims=shape[2:])


def draw(rows: int, shape: tuple[int, ...], device: str) -> list[Tensor]:
    """q, k, v and the gradient of outputs."""
    heads, groups, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(rows)
    sizes = ((heads, key_dim), (groups, key_dim), (groups, value_dim), (heads, value_dim))
    return [torch.randn(rows, *size, generator=generator).to(device, BF16) for size in sizes]


def run(attend: Any, given: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Outputs and gradients of q, k and v."""
    inputs = [each.detach().requires_grad_() for each in given]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def attend_with(backend: FullAttention, views: AttentionViews, scale: float) -> Any:
    return lambda q, k, v: backend.attend(q, k, v, views, scale)


def paths_of(branches: Branches) -> list[list[int]]:
    """Rows of each branch, ancestors first."""
    before, last, paths = parents(branches), -1, []
    for _, rows in branches:
        last += rows
        path = [last]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        paths.append(path[::-1])
    return paths


def long_branches(seed: int) -> list[tuple[int, int]]:
    rng, branches, total = random.Random(seed), [LONG], LONG[1]
    for _ in range(9):
        branches.append((-1 if rng.random() < 0.2 else rng.randrange(total), rng.choice((1, 2, 17, 130, 300))))
        total += branches[-1][1]
    return branches


def errors_of(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_serves_on_this_machine(case: Case, shape: tuple[int, ...], device: str) -> None:
    """The start-up probe passes."""
    assert refusals(case.backend(), need_of(shape, device)) == []


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_tree_serves_in_its_other_tile_sizes(head_dim: int, device: str) -> None:
    assert refusals(Case("tree").backend(), need_of((4, 4, head_dim, head_dim), device)) == []


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_see_their_ancestors_and_themselves_alone(
    case: Case, shape: tuple[int, ...], name: str, device: str
) -> None:
    branches = FORESTS[name]
    rows = sum(length for _, length in branches)
    found = read_visibility(case.backend(), need_of(shape, device), views_of(branches, 0, device))
    for seen, when in zip(found, Passes._fields, strict=True):
        wrong = (seen != visibility(branches, rows).to(device)[:, None]).nonzero()
        assert not len(wrong), f"{when}: {len(wrong)} pairs (row, head, row), the first {wrong[0].tolist()}"


def assert_as_near_as_flat(
    case: Case, shape: tuple[int, ...], branches: Branches, device: str, mean: float = 0.0
) -> None:
    """Outputs and gradients against float64, at most 1.1 times as far as those of every path by itself.

    The gradient of a row's output enters the flat run through the first path that has the row. Gradients of copies are
    summed exactly there, and rounded. A tenth of the unit roundoff is added: norms of roundings differ by as much.

    Args:
        case: the backend.
        shape: heads and head dims.
        branches: of the forest.
        device: where.
        mean: of the gradient of outputs, whose standard deviation is 1.
    """
    backend, scale, paths = case.backend(), shape[2] ** -0.5, paths_of(branches)
    rows, row = sum(length for _, length in branches), torch.tensor([row for path in paths for row in path])
    own = torch.cat(
        [torch.arange(len(path)) >= len(path) - length for path, (_, length) in zip(paths, branches, strict=True)]
    )
    *given, upstream = draw(rows, shape, device)
    upstream = upstream + mean
    row, own = row.to(device), own.to(device)

    seen = visibility(branches, rows).to(device)
    exact = [each.double() for each in given]
    wanted = run(lambda q, k, v: dense(q, k, v, seen, scale), exact, upstream.double())
    found = run(attend_with(backend, views_of(branches, 0, device), scale), given, upstream)

    flat_views = views_of([(-1, len(path)) for path in paths], 0, device)
    given_flat, upstream_flat = [each[row] for each in given], upstream[row] * own[:, None, None]
    flat = run(attend_with(backend, flat_views, scale), given_flat, upstream_flat)
    sums = [torch.zeros_like(a).index_add_(0, row, b.double()) for a, b in zip(wanted[1:], flat[1:], strict=True)]
    errors, allowed = errors_of(found, wanted), errors_of([flat[0][own], *(each.to(BF16) for each in sums)], wanted)
    for name, error, bound in zip(("out", "dq", "dk", "dv"), errors, allowed, strict=True):
        assert error <= 1.1 * bound + 2e-4, (name, errors, allowed)


@pytest.mark.parametrize("forest", ["three levels", "behind most", 0, 1])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_those_of_the_flat_run(case: Case, shape: tuple[int, ...], forest: str | int, device: str) -> None:
    assert_as_near_as_flat(case, shape, FORESTS[forest] if isinstance(forest, str) else long_branches(forest), device)


@pytest.mark.parametrize("branches", [[(-1, 300), *[(20, 200)] * 3], [(-1, 500), *[(50, 60)] * 8]], ids=["3", "8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", [Case("tree"), Case("flash_attention_4")], ids=str)
def test_gradients_that_add_up_are_rounded_once(
    case: Case, shape: tuple[int, ...], branches: Branches, device: str
) -> None:
    """Those of outputs have a mean, so that those of a key that many see are far larger than each part."""
    assert_as_near_as_flat(case, shape, branches, device, mean=2.0)


MANY: Branches = [LONG, *((row, 1 + row % 2) for row in range(260, 0, -1)), *((-1, 1) for _ in range(60))]
"""More branches than libraries search in one step."""
FEW: Branches = THREE_LEVELS
"""Less than a tile of rows."""


@pytest.mark.parametrize("branches", [MANY, FEW], ids=["many branches", "few rows"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_sizes_than_the_probes(case: Case, shape: tuple[int, ...], branches: Branches, device: str) -> None:
    rows = sum(length for _, length in branches)
    *given, upstream = draw(rows, shape, device)
    seen = visibility(branches, rows).to(device)
    wanted = run(lambda q, k, v: dense(q, k, v, seen, 0.1), [each.double() for each in given], upstream.double())
    found = run(attend_with(case.backend(), views_of(branches, 0, device), 0.1), given, upstream)
    assert max(errors_of(found, wanted)) < 8e-3, errors_of(found, wanted)
    for each in read_visibility(case.backend(), need_of(shape, device), views_of(branches, 0, device)):
        assert torch.equal(each, seen[:, None].expand_as(each))


@pytest.mark.parametrize(
    ("first", "last", "forest"),
    [
        (0, 1000, lambda count: [(-1, 1000)] * count),
        (1, 1000, lambda count: [(-1, 1), *[(0, 1000)] * count]),
        (0, 2000, lambda count: [*[(-1, 1000)] * count, (1000 * count - 1, 1000)]),
    ],
    ids=["roots", "branches", "a branch behind roots"],
)
def test_tree_with_more_elements_than_32_bits_count(first: int, last: int, forest: Any, device: str) -> None:
    """The last rows of a large forest, of which the first ones are ancestors, are those of the smallest."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 60:
        pytest.skip(f"needs 60 GiB of free GPU memory, {free:.0f} are")
    shape, large, small = (128, 128, 192, 128), views_of(forest(90), 0, device), views_of(forest(1), 0, device)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, dim: int) -> Tensor:
        return torch.randn(large.rows, heads, dim, generator=generator, device=device, dtype=BF16)

    given, upstream = [drawn(128, 192), drawn(128, 192), drawn(128, 128)], drawn(128, 128)
    assert given[0].numel() > 2**31
    backend, scale = Case("tree").backend(), shape[2] ** -0.5
    whole = run(attend_with(backend, large, scale), given, upstream)
    part = [torch.cat([each[:first], each[-last:]]) for each in (*given, upstream)]
    alone = run(attend_with(backend, small, scale), part[:3], part[3])
    for found, wanted in zip(whole, alone, strict=True):
        rows, others = found[-last:].double(), wanted[-last:].double()
        assert float((rows - others).norm() / others.norm()) < 4e-3


@pytest.mark.parametrize("root", [384, 1152])
@pytest.mark.parametrize("over", [1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_last_tile_may_be_cut_anywhere(shape: tuple[int, ...], over: int, root: int, device: str) -> None:
    """Whole tiles that are cut by the last row, in either direction, before and behind a fork."""
    branches = [(-1, root), (root - 1, 200), (300, 184 + over)]
    backend, rows = Case("tree").backend(), root + 384 + over
    *given, upstream = draw(rows, shape, device)
    seen = visibility(branches, rows).to(device)
    wanted = run(lambda q, k, v: dense(q, k, v, seen, 0.1), [each.double() for each in given], upstream.double())
    found = run(attend_with(backend, views_of(branches, 0, device), 0.1), given, upstream)
    assert max(errors_of(found, wanted)) < 6e-3, errors_of(found, wanted)
    ends = [slice(root - 2, root + 1), slice(root + 199, root + 202), slice(rows - over - 1, rows)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        for end in ends:  # a few rows would not show in the norm of all
            assert float((a[end].double() - b[end]).norm() / b[end].norm()) < 2e-2, (name, end)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_rows_are_zero_and_reach_nothing(case: Case, shape: tuple[int, ...], device: str) -> None:
    branches = [*THREE_LEVELS, LONG]
    rows, padding = 280, 40
    *given, weight = draw(rows + padding, shape, device)
    backend, scale = case.backend(), shape[2] ** -0.5
    clean = run(attend_with(backend, views_of(branches, 0, device), scale), [x[:rows] for x in given], weight[:rows])
    for each in given:
        each[rows:] = torch.nan
    padded = run(attend_with(backend, views_of(branches, padding, device), scale), given, weight)
    for found, wanted in zip(padded, clean, strict=True):
        assert not found[rows:].any()
        assert float((found[:rows].double() - wanted.double()).norm() / wanted.double().norm()) < 4e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_where_a_tree_lies_plays_no_role(case: Case, device: str) -> None:
    shape = SHAPES["mla"]
    tree = [*THREE_LEVELS, (18, 261)]
    behind = [(-1, 137), *((-1 if follows < 0 else follows + 137, rows) for follows, rows in tree)]
    *given, weight = draw(137 + 280, shape, device)
    backend = case.backend()
    whole = run(attend_with(backend, views_of(behind, 0, device), 0.1), given, weight)
    alone = run(attend_with(backend, views_of(tree, 0, device), 0.1), [x[137:] for x in given], weight[137:])
    for found, wanted in zip(whole, alone, strict=True):
        assert float((found[137:].double() - wanted.double()).norm() / wanted.double().norm()) < 4e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_have_the_same_bits_where_it_says_so(case: Case, shape: tuple[int, ...], device: str) -> None:
    backend, branches = case.backend(), long_branches(5)
    views = views_of(branches, 0, device)
    *given, weight = draw(views.rows, shape, device)
    if case.name == "varlen":
        torch.use_deterministic_algorithms(True)
    try:
        if not backend.deterministic(need_of(shape, device)):
            pytest.skip("it does not say that it is deterministic")
        first = run(attend_with(backend, views, 0.1), given, weight)
        for number in range(9):
            again = run(attend_with(backend, views, 0.1), given, weight)
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), f"run {number}"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_does_not_wait_inside_a_layer(case: Case, device: str) -> None:
    shape, branches = SHAPES["mla"], long_branches(6)
    backend, views = case.backend(), views_of(branches, 3, device)
    *given, weight = draw(views.rows, shape, device)
    run(attend_with(backend, views, 0.1), given, weight)  # makes what all layers share
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(attend_with(backend, views, 0.1), given, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backward_pass_needs_no_views(case: Case, device: str) -> None:
    """Those of the forward pass are dropped, and their memory is written over, before it."""
    shape, branches = SHAPES["mha"], long_branches(8)
    backend = case.backend()
    *given, upstream = draw(views_of(branches, 0, device).rows, shape, device)
    inputs = [each.requires_grad_() for each in given]
    out = backend.attend(*inputs, views_of(branches, 0, device), 0.1)
    gc.collect()
    torch.cuda.synchronize()
    taken = [torch.full((2**power,), 2**30, dtype=torch.int32, device=device) for power in range(4, 18) for _ in "0123"]
    found = torch.autograd.grad(out, inputs, upstream)
    del taken
    wanted = run(attend_with(backend, views_of(branches, 0, device), 0.1), given, upstream)[1:]
    assert max(errors_of(list(found), [each.double() for each in wanted])) < 4e-3


MIB = 2**20
WIDE_TREES = {"wide": [(-1, 1500), *[(1499, 70)] * 30], "behind most": [(-1, 3000), *[(2999, 20)] * 30]}
"""3,600 rows whose branches have 48,600 keys and 93,600."""


@pytest.mark.parametrize("branches", WIDE_TREES.values(), ids=WIDE_TREES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_between_the_passes_no_expanded_row_is_held(
    case: Case, shape: tuple[int, ...], branches: Branches, device: str
) -> None:
    """Beside q, k and v, outputs (in the wider head dim, if a library has one) and what has a number for a query."""
    backend, views = case.backend(), views_of(branches, 0, device)
    *given, upstream = draw(views.rows, shape, device)
    expanded = backend.cost(views, need_of(shape, device)).expanded_bytes
    allowed = views.rows * shape[0] * (max(shape[2:]) * 2 + 4) + 8 * MIB
    assert allowed < 0.65 * expanded or not expanded
    inputs = [each.requires_grad_() for each in given]
    attend, one = attend_with(backend, views, 0.1), torch.ones((), device=device, requires_grad=True)
    for number in range(3):  # the first makes what all layers share
        before = torch.cuda.memory_allocated()
        out = attend(*inputs)
        held = torch.cuda.memory_allocated() - before
        found = torch.autograd.grad(out, inputs, upstream)
        del out, found
        torch.autograd.grad(one * 2, one)  # autograd's thread lets go of the pass before when it takes the next one
        left = torch.cuda.memory_allocated() - before
        if number:
            assert held <= allowed, (held / MIB, allowed / MIB, expanded / MIB)
            assert left <= MIB, left / MIB


@pytest.mark.parametrize("branches", WIDE_TREES.values(), ids=WIDE_TREES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_both_passes_no_expanded_row_is_held_by_what_does_not_expand(
    case: Case, shape: tuple[int, ...], branches: Branches, device: str
) -> None:
    """Its peak is outputs and gradients of compact rows, sums of gradients in float32 among them; others' is above."""
    backend, views = case.backend(), views_of(branches, 0, device)
    *given, upstream = draw(views.rows, shape, device)
    (heads, groups, key_dim, value_dim), room = shape, 8 * MIB
    expanded = int(views.cu_k[-1]) * groups * (key_dim + value_dim) * BF16.itemsize
    assert room < expanded / 4
    summed = heads * key_dim + (groups * (key_dim + value_dim) if heads != groups else 0)
    compact = 2 * upstream.nbytes + sum(each.nbytes for each in given) + 4 * (views.rows + 256) * summed
    inputs, attend = [each.requires_grad_() for each in given], attend_with(backend, views, 0.1)
    for _ in range(2):  # the first makes what all layers share
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = torch.autograd.grad(attend(*inputs), inputs, upstream)
        peak = torch.cuda.max_memory_allocated() - before
        del found
    assert (peak <= compact + room) is not backend.expands, (peak / MIB, compact / MIB, expanded / MIB)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "tree"], ids=str)
def test_rows_that_are_expanded_again_change_no_result(
    case: Case, shape: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, views = case.backend(), views_of(long_branches(7), 3, device)
    *given, weight = draw(views.rows, shape, device)
    attend = attend_with(backend, views, 0.1)
    if case.name == "varlen":
        torch.use_deterministic_algorithms(True)
    try:
        found = run(attend, given, weight)
        recomputed = run(lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False), given, weight)
        monkeypatch.setattr(packed, "made_again", lambda *recipes: nullcontext())
        wanted = run(attend, given, weight)
        same = backend.deterministic(need_of(shape, device))
    finally:
        torch.use_deterministic_algorithms(False)
    for each in (found, recomputed):
        if same:
            assert all(torch.equal(a, b) for a, b in zip(each, wanted, strict=True))
        assert max(errors_of(each, [x.double() for x in wanted])) < 4e-3


@pytest.mark.parametrize("shape", [(16, 192), (16, 128), (2, 128), (3, 40)], ids=str)
def test_gradients_of_copies_are_summed_in_float32_and_rounded_once(shape: tuple[int, int], device: str) -> None:
    views = views_of([(-1, 300), *[(299, 3)] * 40, (200, 70)], 5, device)
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(views.rows, *shape, generator=draw, device=device, dtype=BF16).requires_grad_()
    out = expand(x, views)
    assert torch.equal(out, x.detach()[views.key_row])
    upstream = torch.randn(out.shape, generator=draw, device=device, dtype=BF16)
    (found,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    total = torch.zeros(views.rows, *shape).index_add_(0, views.key_row.cpu(), upstream.float().cpu())
    assert torch.equal(found.cpu(), total.to(BF16))
    assert all(torch.equal(found, torch.autograd.grad(out, x, upstream, retain_graph=True)[0]) for _ in range(5))


def test_expanded_rows_past_the_elements_that_32_bits_count(device: str) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 20:
        pytest.skip(f"needs 20 GiB of free GPU memory, {free:.0f} are")
    views = views_of([(-1, 1000), *[(999, 1)] * 800], 0, device)
    x = torch.randn(views.rows, 16, 192, device=device, dtype=BF16).requires_grad_()
    out = expand(x, views)
    assert out.numel() > 2**31
    assert torch.equal(out[-1001:], x.detach()[views.key_row[-1001:]])
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
    copies = torch.bincount(views.key_row, minlength=views.rows).to(BF16)
    assert torch.equal(found, copies[:, None, None].expand_as(found))
