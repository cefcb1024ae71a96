import random

import numpy as np
import pytest
import torch

from harts.backends.full.tree.preorder import preorder, rows_followed
from tests.backends.full.forests import THREE_LEVELS, Branches, random_branches, views_of, visibility

DEEP = [(-1, 1), *((row, 1) for row in range(40))]
"""One-token branches, each of which leaves after the one before."""
COMB = [(-1, 9), *((row, 2) for row in (8, 8, 0, 3, 3, 3, 8))]
"""Several branches after one row, and not in the order of the rows."""


def seen_by_intervals(branches: Branches) -> torch.Tensor:
    enter, leave = map(torch.from_numpy, preorder(views_of(branches)))
    return (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])


@pytest.mark.parametrize("branches", [THREE_LEVELS, DEEP, COMB, [(-1, 1)], [(-1, 3), (-1, 1), (-1, 4)]])
def test_intervals_are_what_rows_see(branches):
    rows = sum(length for _, length in branches)
    assert torch.equal(seen_by_intervals(branches), visibility(branches, rows))


@pytest.mark.parametrize("seed", range(60))
def test_intervals_of_random_forests_are_what_rows_see(seed):
    branches = random_branches(random.Random(seed))
    rows = sum(length for _, length in branches)
    assert torch.equal(seen_by_intervals(branches), visibility(branches, rows))
    assert sorted(preorder(views_of(branches)).enter) == list(range(rows))


def test_rows_followed():
    assert rows_followed(views_of(THREE_LEVELS)).tolist() == [-1, 2, 4, 11]
    assert np.array_equal(rows_followed(views_of(COMB)), [-1, 8, 8, 0, 3, 3, 3, 8])
