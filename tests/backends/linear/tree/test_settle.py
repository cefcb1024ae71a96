"""Head rows into the rows that they belong to: sums are wide, in order, rounded once."""

import pytest
import torch

from harts.backends.linear.tree.settle import BLOCK, settle_rows

ROW = [7, 0, 4, 5]
OWN = [3, -1, -1, 0]
REPLAYS = [[1, 2, 4], [5], [2, 6], []]
"""Row 7 is owned and replayed, rows 0 and 4 are replayed only, row 5 is owned only; the others stay."""


def settled(body: torch.Tensor, head: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    found = body.clone()
    for row, own, replays in zip(ROW, OWN, REPLAYS, strict=True):
        total = (head[own] if own >= 0 else body[row]).to(wide)
        for each in replays:
            total = total + head[each].to(wide)
        found[row] = total.to(body.dtype)
    return found


def columns(device: str) -> list[torch.Tensor]:
    bounds = torch.tensor([0, *map(len, REPLAYS)]).cumsum(0)
    source = torch.tensor([each for replays in REPLAYS for each in replays])
    return [x.to(device) for x in (torch.tensor(ROW), torch.tensor(OWN), bounds, source)]


def drawn(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).to(
        device, dtype
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 16), (1, BLOCK), (3, BLOCK // 2 + 1)], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32)], ids=str)
def test_rows_hold_their_own_value_and_the_sum_of_their_replays(dtypes, shape, device):
    body, head = drawn(9, shape, dtypes[0], device), drawn(8, shape, dtypes[1], device)
    wanted = settled(body, head, torch.float32)
    settle_rows([body], [head], *columns(device))
    assert torch.equal(body, wanted)


def test_sums_of_float64_rows_are_float64(device):
    body, head = drawn(9, (4, 5), torch.float64, device), drawn(8, (4, 5), torch.float64, device)
    wanted = settled(body, head, torch.float64)
    settle_rows([body], [head], *columns(device))
    assert torch.equal(body, wanted)


def test_several_tensors_are_settled_in_one_launch(device):
    shapes = [(2, BLOCK), (3,), (), (2, 700), (5, 5)]
    dtypes = [torch.float16, torch.float32, torch.float32, torch.float16, torch.float32]
    bodies = [drawn(9, shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    heads = [drawn(8, shape, torch.float32, device) for shape in shapes]
    wanted = [settled(*pair, torch.float32) for pair in zip(bodies, heads, strict=True)]
    settle_rows(bodies, heads, *columns(device))
    assert all(torch.equal(*pair) for pair in zip(bodies, wanted, strict=True))


def test_half_precision_sums_are_rounded_once(device):
    body, head = torch.zeros(9, 1, device=device), torch.full((8, 1), 3 * 2.0**-12, device=device)
    head[3] = 1.0
    body, head = body.half(), head.half()
    settle_rows([body], [head], *columns(device))
    # rounded after each of the three replays it would be 1 + 3 * 2 ** -10
    assert body[7].item() == 1.0 + 2.0**-9


def test_poison_in_rows_that_are_replaced_or_not_named_reaches_nothing(device):
    body, head = drawn(9, (20,), torch.float32, device), drawn(8, (20,), torch.float32, device)
    body[[7, 5]] = torch.nan
    head[7] = torch.nan
    settle_rows([body], [head], *columns(device))
    assert body.isfinite().all()


def test_nothing_to_settle_changes_nothing(device):
    body, head = drawn(9, (20,), torch.float32, device), drawn(8, (20,), torch.float32, device)
    wanted, none = body.clone(), torch.zeros(0, dtype=torch.int64, device=device)
    settle_rows([body], [head], none, none, none.new_zeros(1), none)
    assert torch.equal(body, wanted)
