from __future__ import annotations

from bisect import bisect_right

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
def test_tables_list_every_user_of_every_row_that_other_sequences_read(seed: int) -> None:
    width = seed % 5 + 1
    plan = plan_of(random_layout(seed, width))
    shared = shared_rows(plan.conv_row, plan.cu_rows)
    sequence = [bisect_right(plan.cu_rows, row) for row in range(plan.rows)]
    wanted = {
        row: users
        for row, users in enumerate(users_of_each_row(plan.conv_row))
        if any(sequence[user] != sequence[row] for _, user in users)
    }
    pairs = list(zip(shared.tap.tolist(), shared.user.tolist(), strict=True))
    found = {
        row: pairs[begin:end]
        for row, begin, end in zip(shared.row.tolist(), shared.offset[:-1], shared.offset[1:], strict=True)
    }
    assert found == wanted
    assert shared.row.tolist() == sorted(wanted)


def test_a_sequence_right_behind_its_context_shares_it_too() -> None:
    row_WC = torch.tensor([[5, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert shared_rows(row_WC, [0, 5]).row.tolist() == []
    assert shared_rows(row_WC, [0, 3, 5]).row.tolist() == [2]


def test_chains_share_no_rows() -> None:
    plan = plan_of(layout_of([[1, 2, 3, 4, 5], [6], [7, 8]]))
    assert [len(table) for table in shared_rows(plan.conv_row, plan.cu_rows)] == [0, 1, 0, 0]
