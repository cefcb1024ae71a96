"""How lists are walked and which tile a block takes, over a library in plain Python."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.backends.full.tree.library import BLOCK, SingleTileScheduler, flash_fwd_sm90, put_in_place

PLACE = (0, 3, 7)
"""Sequence, head and tile of keys."""


class Numbers:
    """A tensor of the kernels' language, of one row at `PLACE`."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __getitem__(self, index: Any) -> Any:
        assert index in {PLACE, (*PLACE, None)}
        return self.row


class Added(NamedTuple):
    """One tile that was added to the gradients."""

    tile: int
    mask: dict[str, Any]
    onto: bool


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    put_in_place(monkeypatch)
    return importlib.import_module("harts.backends.full.tree.hopper")


def ours() -> None:
    """A mask."""


def apply_mask() -> None:
    """The library's, for one tile."""


def walked(hopper: Any, some: list[int], whole: list[int], mask_mod: Any = ours, parts: int = 1) -> Any:
    """Tiles that were added, if the loop is ours; what the library's loop was given, if it is not."""
    added: list[Added] = []

    def step(tile: int, state_q: int, state_do: int, **settings: Any) -> tuple[int, int]:
        mask = settings.pop("mask_fn")
        added.append(Added(tile, {**mask.keywords, "by": mask.func}, settings.pop("dKV_accumulate")))
        assert settings == {"score_mod_fn": "score", "score_mod_bwd_fn": "score bwd"}
        return state_q + 1, state_do + 2

    lists = (len(some), [*some, 0, 0], len(whole), [*whole, 0, 0])
    settings = {
        "thr_mma_SdP": "mma",
        "aux_data": "aux",
        "score_mod_fn": "score",
        "score_mod_bwd_fn": "score bwd",
        "q_subtile_factor": parts,
    }
    found = hopper.flash_bwd_sm90.consume_block_sparse_mma_bwd_sm90(
        (*map(Numbers, lists), "more"),
        *PLACE,
        10,
        20,
        step,
        SimpleNamespace(apply_mask=apply_mask),
        mask_mod,
        **settings,
    )
    if not added:
        return found
    assert found == (10 + len(added), 20 + 2 * len(added))
    return added


@pytest.mark.parametrize(("some", "whole"), [([4, 9], [1, 2, 6]), ([], [5, 8]), ([3], []), ([2, 0], [7])])
def test_partial_tiles_come_first_and_alone_are_masked_by_places(
    hopper: Any, some: list[int], whole: list[int]
) -> None:
    hopper.run_as_here(ours)
    added = walked(hopper, some, whole)
    assert [each.tile for each in added] == [*some, *whole]
    assert [each.onto for each in added] == [False] + [True] * (len(added) - 1)
    assert [each.mask.pop("mask_mod", None) for each in added] == [ours] * len(some) + [None] * len(whole)
    batch, head, keys = PLACE
    of_all = {"batch_idx": batch, "head_idx": head, "n_block": keys, "thr_mma": "mma", "aux_data": "aux"}
    assert all(each.mask == {"by": apply_mask, "mask_seqlen": True, "mask_causal": False, **of_all} for each in added)


@pytest.mark.parametrize(("mask_mod", "parts"), [(None, 1), (ours, 2)])
def test_other_masks_and_coarser_lists_are_walked_by_the_library(hopper: Any, mask_mod: Any, parts: int) -> None:
    hopper.run_as_here(ours)
    given, settings = walked(hopper, [1], [2], mask_mod, parts)
    assert given[1:6] == (*PLACE, 10, 20)
    assert given[8] is mask_mod
    assert settings["q_subtile_factor"] == parts
    assert len(settings) == 5


def made() -> SingleTileScheduler:
    """The scheduler of a kernel that is compiled now, of 9 tiles of queries."""
    found: SingleTileScheduler = flash_fwd_sm90().SingleTileScheduler.create(SimpleNamespace(num_block=9))
    return found


def test_the_last_tile_of_queries_comes_first(hopper: Any) -> None:
    hopper.run_as_here(ours)
    with hopper.longest_first():
        assert made().block == (9 - 1 - BLOCK[0], *BLOCK[1:])


def test_the_order_is_that_of_this_thread_meanwhile(hopper: Any) -> None:
    hopper.run_as_here(ours)
    assert made().block == BLOCK
    with ThreadPoolExecutor() as pool, hopper.longest_first():
        assert pool.submit(made).result().block == BLOCK
    with pytest.raises(ValueError, match="refused"), hopper.longest_first():
        raise ValueError("refused")
    assert made().block == BLOCK
