"""Rows copied to all branches that see them; gradients of copies summed in order."""

import random

import pytest
import torch
from torch import Tensor

from harts.backends.full.expand import copies_of, expand, lie_in_order
from tests.backends.full.forests import THREE_LEVELS, Branches, random_branches, views_of

pytest.importorskip("triton")

from harts.backends.full.expand_rows import BLOCK, gather_rows, sum_copies

FAN = [(-1, 3), *[(1, 2)] * 11, (2, 1)]
"""Rows 0 and 1 have 13 copies, row 2 two."""
FORESTS = {"three levels": THREE_LEVELS, "fan": FAN, "alone": [(-1, 1)], "random": random_branches(random.Random(3))}
HEADS = {"(2, 5)": (2, 5), "(1, 16)": (1, 16), "(3, 700)": (3, 700)}


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def draw(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    drawn = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return drawn.to(device, dtype)


def summed(grad: Tensor, rows: int, key_row: Tensor, wide: torch.dtype) -> Tensor:
    """One copy after the other, rounded at the end."""
    total = torch.zeros(rows, *grad.shape[1:], dtype=wide, device=grad.device)
    for copy, row in zip(grad, key_row.tolist(), strict=True):
        total[row] = total[row] + copy.to(wide)
    return total.to(grad.dtype)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
def test_rows_and_gradients_equal_those_of_index_select(branches: Branches, padding: int) -> None:
    views = views_of(branches, padding)
    x = draw(views.rows, (2, 5), torch.float64).requires_grad_()
    found, wanted = expand(x, views), x.index_select(0, views.key_row)
    assert torch.equal(found, wanted)
    weight = draw(len(found), (2, 5), torch.float64)
    (got,), (expected,) = (torch.autograd.grad(each, x, weight) for each in (found, wanted))
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    assert not got[views.rows - padding :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_summed_in_order_in_a_wide_type_and_rounded_once(dtype: torch.dtype, device: str) -> None:
    views = views_of(FAN, 2, device)
    x = draw(views.rows, (2, 16), dtype, device).requires_grad_()
    found = expand(x, views)
    weight = draw(len(found), (2, 16), dtype, device)
    wide = torch.promote_types(dtype, torch.float32)
    (got,) = torch.autograd.grad(found, x, weight)
    assert got.dtype == dtype
    assert torch.equal(got, summed(weight, views.rows, views.key_row, wide))


@pytest.mark.parametrize("padding", [0, 4])
def test_rows_that_no_branch_shares_are_not_copied(padding: int) -> None:
    views = views_of([(-1, 9), (-1, 1), (-1, 4)], padding)
    x = draw(views.rows, (2, 5), torch.float64).requires_grad_()
    found = expand(x, views)
    assert (found is x) == (not padding)
    assert found.data_ptr() == x.data_ptr() and len(found) == 14
    weight = draw(14, (2, 5), torch.float64)
    (got,) = torch.autograd.grad(found, x, weight)
    assert torch.equal(got[:14], weight) and not got[14:].any()
    strided = expand(x.transpose(1, 2), views)
    assert strided.is_contiguous() and torch.equal(strided, x.transpose(1, 2)[:14])


@pytest.mark.parametrize(
    ("branches", "wanted"), [([(-1, 3), (-1, 2)], True), ([(-1, 3), (2, 2)], False), ([(-1, 3), (1, 2)], False)]
)
def test_rows_lie_in_order_where_no_branch_has_an_ancestor(branches: Branches, wanted: bool) -> None:
    views = views_of(branches, 2)
    assert lie_in_order(views) is wanted
    assert wanted == torch.equal(views.key_row, torch.arange(5))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("branches", FORESTS.values(), ids=FORESTS)
def test_copies_are_listed_in_the_order_of_the_branches(branches: Branches, padding: int) -> None:
    views = views_of(branches, padding)
    where = copies_of(views)
    for row in range(views.rows):
        begin, end = where.offset[where.interval[row]], where.offset[where.interval[row] + 1]
        assert torch.equal(where.base[begin:end] + row, (views.key_row == row).nonzero().flatten())
    assert copies_of(views) is where


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_kernels_copy_rows_and_sum_copies(dtype: torch.dtype, heads: tuple[int, int], device: str) -> None:
    views = views_of(FAN, 2, device)
    x = draw(views.rows, heads, dtype, device)
    assert torch.equal(gather_rows(x, views.key_row), x[views.key_row])
    grad = draw(len(views.key_row), heads, dtype, device)
    wanted = summed(grad, views.rows, views.key_row, torch.promote_types(dtype, torch.float32))
    assert torch.equal(sum_copies(grad, copies_of(views)), wanted)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_serve_random_forests(seed: int, device: str) -> None:
    views = views_of(random_branches(random.Random(seed)), seed, device)
    x = draw(views.rows, (2, BLOCK // 2 + 8), torch.float32, device)
    assert torch.equal(gather_rows(x, views.key_row), x[views.key_row])
    grad = draw(len(views.key_row), (3, 8), torch.float32, device)
    assert torch.equal(sum_copies(grad, copies_of(views)), summed(grad, views.rows, views.key_row, torch.float32))


def test_rows_and_heads_may_have_strides(device: str) -> None:
    views = views_of(THREE_LEVELS, 0, device)
    whole = draw(views.rows, (3, 24), torch.float32, device)
    for part in (
        whole[:, :, 8:],
        whole[:, 1:2],
        whole[:, :, ::2],
        whole.transpose(1, 2),
        whole[:, :1].expand(-1, 3, -1),
    ):
        found = gather_rows(part, views.key_row)
        assert found.is_contiguous()
        assert torch.equal(found, part[views.key_row])


def test_poison_in_rows_that_nothing_sees_reaches_nothing(device: str) -> None:
    views = views_of(THREE_LEVELS, 3, device)
    x = draw(views.rows, (2, 5), torch.float32, device)
    x[-3:] = torch.nan
    assert gather_rows(x, views.key_row).isfinite().all()
    assert not sum_copies(draw(len(views.key_row), (2, 5), torch.float32, device), copies_of(views))[-3:].any()
