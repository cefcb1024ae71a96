"""What the launches of one microbatch share, on the device: lists of tiles in both directions and places of rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.full.tree.preorder import Preorder, preorder
from harts.backends.full.tree.tiles import Tiles, lists, visible_tiles
from harts.backends.linear.sizes import ceil_div
from harts.backends.placing import place
from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int32

Tile = tuple[int, int]
"""Query rows and key rows of a tile."""
MOST_TILE_ROWS = 128
"""Of all tiles, on either side."""
MOST_ROWS = 2**31 - MOST_TILE_ROWS
"""Kernels count rows in 32 bits, up to whole tiles."""


class TileSizes(NamedTuple):
    """Of listed tiles: the kernels' own, so that no tile is computed in which nobody sees anything."""

    forward: Tile
    backward: Tile


class DeviceLists(NamedTuple):
    """Tiles of one pass by the tiles of one side: int32 on the device, [1, 1, M] and [1, 1, M, W]."""

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor


class TreePlan(NamedTuple):
    """One microbatch for head dims of some tile sizes.

    All tensors are parts of one: kernels are given the address of `intervals`, and what holds lists for a backward pass
    holds them, too.
    """

    intervals: Tensor
    """`Preorder.enter` of each row and how many rows see it, int32, [C up to whole tiles on either side, 2]."""
    keys_of_queries: DeviceLists
    """Forward: tiles of keys of each tile of queries."""
    queries_of_keys: DeviceLists
    """Backward: tiles of queries of each tile of keys."""
    sizes: TileSizes


def tile_sizes(head_dims: tuple[int, int]) -> TileSizes | None:
    """Tile sizes of FlashAttention 4.0.0b36 on compute capability 9.0 for head dims (Dk, Dv); None: not known.

    The library refuses lists that its kernels' tiles do not divide. For head dims above 96 up to 128 it has another
    backward kernel with tiles of 80 queries, which was slower with lists.
    """
    key_dim, value_dim = head_dims
    if key_dim <= 128 and value_dim <= 128:
        return TileSizes((128, 128), (128 if key_dim <= 64 else 64, 128))
    if key_dim <= 192 and value_dim <= 128:
        return TileSizes((128, 128), (64, 96))
    if key_dim == value_dim == 256:
        return TileSizes((128, 80), (64, 64))
    return None


def forward_tiles(views: AttentionViews, sizes: TileSizes) -> Tiles:
    """Visible tiles of the forward pass; found once for the views."""
    return _tiles(views, sizes.forward)


def backward_tiles(views: AttentionViews, sizes: TileSizes) -> Tiles:
    """Visible tiles of the backward pass; found once for the views."""
    return _tiles(views, sizes.backward)


def tree_plan(views: AttentionViews, sizes: TileSizes) -> TreePlan:
    """The plan of some views, made once for them.

    Raises:
        ValueError: there are more rows than 32 bits count.
    """
    return views.once(("tree plan", sizes), lambda: _tree_plan(views, sizes))


def _tree_plan(views: AttentionViews, sizes: TileSizes) -> TreePlan:
    rows = int(views.cu_q[-1])
    if rows > MOST_ROWS:
        raise ValueError(f"views: there are {rows} rows, kernels count {MOST_ROWS}")
    arrays = [
        _intervals(preorder(views)),
        *_lists(forward_tiles(views, sizes), "query", rows, sizes.forward),
        *_lists(backward_tiles(views, sizes), "key", rows, sizes.backward),
    ]
    intervals, *parts = _place_together(arrays, views.device)
    by_queries, by_keys = ([part[None, None] for part in some] for some in (parts[:4], parts[4:]))
    return TreePlan(intervals, DeviceLists(*by_queries), DeviceLists(*by_keys), sizes)


def _tiles(views: AttentionViews, tile: Tile) -> Tiles:
    return views.once(("tiles", tile), lambda: visible_tiles(views, *tile))


def _intervals(order: Preorder) -> Int32:
    """Kernels ask for the intervals of all rows of a tile, also of those past the last row, which nobody sees."""
    pairs = np.stack([order.enter, order.leave - order.enter], axis=1).astype(np.int32)
    return np.pad(pairs, ((0, MOST_TILE_ROWS), (0, 0)))


def _lists(tiles: Tiles, by: Literal["query", "key"], rows: int, tile: Tile) -> list[Int32]:
    """Counts and indices, [M] and [M, W], of tiles seen in part, then of those seen whole."""
    queries, keys = (ceil_div(rows, size) for size in tile)
    one, other, *counts = (
        (tiles.query, tiles.key, queries, keys) if by == "query" else (tiles.key, tiles.query, keys, queries)
    )
    return [array for which in (~tiles.full, tiles.full) for array in lists(one[which], other[which], *counts)]


def _place_together(arrays: list[Int32], device: torch.device) -> list[Tensor]:
    """Each array as a part of one tensor of the device."""
    whole = place(np.concatenate([array.ravel() for array in arrays]), device)
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
