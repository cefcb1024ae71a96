import random

import numpy as np
import pytest
import torch
from torch.nn import functional

from harts.backends.full.tree import tiles as tile_module
from harts.backends.full.tree.tiles import lists, visible_tiles
from harts.backends.plan_tensors import AttentionViews
from tests.backends.full.forests import THREE_LEVELS, Branches, random_branches, views_of, visibility

SIZES = [(4, 4), (8, 3), (3, 8), (1, 1), (128, 96)]
LONG = [(-1, 300), (299, 70), (130, 1), (130, 1), (127, 128), (255, 5), (504, 130)]


def tiles_by_definition(branches: Branches, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles hold a visible pair, and which hold no other, [tiles of queries, tiles of keys]."""
    rows = sum(length for _, length in branches)
    seen = visibility(branches, rows)
    down, across = -(-rows // size[0]), -(-rows // size[1])
    pad = (0, across * size[1] - rows, 0, down * size[0] - rows)
    tiles = [
        functional.pad(each.int(), pad, value=past).view(down, size[0], across, size[1]).bool()
        for each, past in ((seen, 0), (seen, 1))
    ]
    return tiles[0].any(3).any(1), tiles[1].all(3).all(1)


def assert_as_defined(branches: Branches, size: tuple[int, int]) -> None:
    some, full = tiles_by_definition(branches, size)
    found = visible_tiles(views_of(branches), *size)
    got_some, got_full = torch.zeros_like(some), torch.zeros_like(full)
    got_some[found.query, found.key] = True
    got_full[found.query, found.key] = torch.from_numpy(found.full)
    assert torch.equal(got_some, some)
    assert torch.equal(got_full, full)
    assert len(found.query) == int(some.sum())  # none twice


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("branches", [THREE_LEVELS, LONG, [(-1, 1)], [(-1, 1), *((i, 1) for i in range(50))]])
def test_tiles_are_those_of_the_matrix(branches, size):
    assert_as_defined(branches, size)


@pytest.mark.parametrize("seed", range(40))
def test_tiles_of_random_forests_are_those_of_the_matrix(seed):
    rng = random.Random(seed)
    assert_as_defined(random_branches(rng), rng.choice(SIZES))


@pytest.mark.parametrize("cells", [1, 7, 20])
@pytest.mark.parametrize("branches", [THREE_LEVELS, LONG, [(-1, 1), *((i, 1) for i in range(50))]])
def test_tiles_are_the_same_however_many_are_counted_at_a_time(branches, cells, monkeypatch):
    monkeypatch.setattr(tile_module, "CELLS", cells)
    for size in ((4, 4), (8, 3), (128, 96)):
        assert_as_defined(branches, size)


def test_lists_ascend_and_hold_every_tile_once():
    one, other = np.array([3, 0, 3, 3, 0]), np.array([5, 2, 0, 4, 1])
    found = lists(one, other, 5, 9)
    assert found.counts.tolist() == [2, 0, 0, 3, 0]
    assert found.indices.tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 4, 5], [0, 0, 0]]
    assert found.indices.dtype == found.counts.dtype == np.int32


def test_lists_are_one_wide_only_where_the_other_side_is_one_tile():
    assert lists(np.array([0]), np.array([1]), 1, 2).indices.shape == (1, 2)
    assert lists(np.array([0]), np.array([0]), 1, 1).indices.shape == (1, 1)
    none = np.zeros(0, dtype=np.int64)
    assert lists(none, none, 3, 2).indices.shape == (3, 2)


def test_tiles_of_many_rows_are_found_without_the_matrix():
    """A chain of 200,000 rows and branches of one row each: 2 * 10^10 pairs."""
    follows = np.arange(0, 200_000, 997)
    ones = np.ones_like(follows)
    run_row = np.stack([0 * follows, 200_000 + np.arange(len(follows))], axis=1).ravel()
    run_length = np.stack([follows + 1, ones], axis=1).ravel()
    views = AttentionViews(
        cu_q=np.concatenate([[0, 200_000], 200_000 + np.cumsum(ones)]),
        run_offset=np.concatenate([[0], 1 + 2 * np.arange(len(follows) + 1)]),
        run_row=np.concatenate([[0], run_row]),
        run_length=np.concatenate([[200_000], run_length]),
        rows=200_000 + len(follows),
        device=torch.device("cpu"),
    )
    found = visible_tiles(views, 128, 128)
    chain = 200_000 // 128  # tiles of queries with rows of the chain alone
    assert (found.query < chain).sum() == chain * (chain + 1) // 2
    assert found.full[found.query < chain].sum() == chain * (chain - 1) // 2
    of_branches = found.query == chain + 1
    last = follows[(chain + 2) * 128 - 200_000 - 1]  # what the last branch of that tile follows
    assert found.key[of_branches].tolist() == [*range(last // 128 + 1), chain + 1]
