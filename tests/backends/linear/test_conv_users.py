from __future__ import annotations

import pytest
import torch

from harts.backends.linear.conv_users import shared_rows
from tests.backends.linear.trees import layout_of, plan_of, random_layout


def users_of_each_row(row_WC: torch.Tensor) -> list[list[tuple[int, int]]]:
    """(tap, user) pairs by row, in that order."""
    users: list[list[tuple[int, int]]] = [[] for _ in range(row_WC.shape[1])]
    for tap, reads in enumerate(row_WC.tolist()):
        for user, row in enumerate(reads):
            if row < len(users):
                users[row].append((tap, user))
    return users


@pytest.mark.parametrize("seed", range(10))
def test_tables_list_every_user_of_every_row_that_others_read(seed: int) -> None:
    width = seed % 5 + 1
    row_WC = plan_of(random_layout(seed, width)).conv_row
    shared = shared_rows(row_WC)
    wanted = {
        row: users
        for row, users in enumerate(users_of_each_row(row_WC))
        if any(user != row + width - 1 - tap for tap, user in users)
    }
    pairs = list(zip(shared.tap.tolist(), shared.user.tolist(), strict=True))
    found = {
        row: pairs[begin:end]
        for row, begin, end in zip(shared.row.tolist(), shared.offset[:-1], shared.offset[1:], strict=True)
    }
    assert found == wanted
    assert shared.row.tolist() == sorted(wanted)


def test_chains_share_no_rows() -> None:
    shared = shared_rows(plan_of(layout_of([[1, 2, 3, 4, 5], [6], [7, 8]])).conv_row)
    assert [len(table) for table in shared] == [0, 1, 0, 0]
