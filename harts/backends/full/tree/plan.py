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
MOST_ROWS = 2**30 - MOST_TILE_ROWS
"""Two numbers a row are indexed in 32 bits."""


class TileSizes(NamedTuple):
    """Of listed tiles, which have to match the kernels' own: a kernel cuts a listed tile into its own ones."""

    forward: Tile
    backward: Tile


class DeviceLists(NamedTuple):
    """Tiles of one pass by the tiles of one side: int32 on the device, [1, 1, M] and [1, 1, M, W]."""

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    tile: Tile


class Listed(NamedTuple):
    """The last rows, and all rows that they see, in lists of tiles."""

    places: Tensor
    """`Preorder.enter` and `Preorder.leave` of each query row in turn, int32, [2 * queries up to whole tiles]."""
    intervals: Tensor
    """The same of each key row, int32, [2 * C up to whole tiles]."""
    keys_of_queries: DeviceLists
    """Forward: tiles of keys of each tile of queries."""
    queries_of_keys: DeviceLists
    """Backward: tiles of queries of each tile of keys."""
    rows: int
    """C."""


class TreePlan(NamedTuple):
    """One microbatch for head dims of some tile sizes."""

    roots: AttentionViews
    """Of the branches that are packed sequences, which are roots and come first."""
    listed: Listed | None
    """All others; none if there are none."""


def tile_sizes(head_dims: tuple[int, int]) -> TileSizes | None:
    """Tile sizes of FlashAttention 4.0.0b36 on compute capability 9.0 for head dims (Dk, Dv); None: not known.

    The library refuses lists of other sizes.
    """
    key_dim, value_dim = head_dims
    if key_dim <= 128 and value_dim <= 128:
        return TileSizes((128, 128), (128 if key_dim <= 64 else 64, 128))
    if key_dim <= 192 and value_dim <= 128:
        return TileSizes((128, 128), (64, 96))
    if key_dim == value_dim == 256:
        return TileSizes((128, 80), (64, 64))
    return None


def roots_of(views: AttentionViews) -> AttentionViews:
    """The branches before the first row that goes by lists, as views of their own; made once for the views."""
    return views.once("roots", lambda: _roots(views))


def forward_tiles(views: AttentionViews, sizes: TileSizes) -> Tiles:
    """Visible tiles of the forward pass of listed rows; found once for the views."""
    return _tiles(views, sizes.forward)


def backward_tiles(views: AttentionViews, sizes: TileSizes) -> Tiles:
    """Visible tiles of the backward pass of listed rows; found once for the views."""
    return _tiles(views, sizes.backward)


def tree_plan(views: AttentionViews, sizes: TileSizes) -> TreePlan:
    """The plan of some views, made once for them.

    Raises:
        ValueError: there are more rows than 32 bits count.
    """
    return views.once(("tree plan", sizes), lambda: _tree_plan(views, sizes))


def _tree_plan(views: AttentionViews, sizes: TileSizes) -> TreePlan:
    rows, roots = int(views.cu_q[-1]), roots_of(views)
    return TreePlan(roots, None if roots.rows == rows else _listed(views, roots.rows, rows, sizes))


def _first_listed(views: AttentionViews) -> int:
    """First row of those that go by lists: of the first branch that has ancestors, C if none has.

    Rounds are in order, so roots come before it. They are packed only where they hold at least half of all pairs:
    gradients of their keys come from both kinds of launches then, and are rounded once more.
    """
    branches = np.flatnonzero(np.diff(views.run_offset) > 1)
    if not len(branches):
        return int(views.cu_q[-1])
    roots = np.diff(views.cu_q[: branches[0] + 1])
    return int(views.cu_q[branches[0]]) if (roots * (roots + 1)).sum() >= views.pairs else 0


def _roots(views: AttentionViews) -> AttentionViews:
    first = _first_listed(views)
    count = int(np.searchsorted(views.cu_q, first))
    return AttentionViews(
        cu_q=views.cu_q[: count + 1],
        run_offset=views.run_offset[: count + 1],
        run_row=views.run_row[:count],
        run_length=views.run_length[:count],
        rows=first,
        device=views.device,
    )


def _tiles(views: AttentionViews, tile: Tile) -> Tiles:
    return views.once(("tiles", tile), lambda: visible_tiles(views, *tile, roots_of(views).rows))


def _listed(views: AttentionViews, first: int, rows: int, sizes: TileSizes) -> Listed:
    if rows > MOST_ROWS:
        raise ValueError(f"views: there are {rows} rows, kernels count {MOST_ROWS} with an interval each")
    forward, backward = forward_tiles(views, sizes), backward_tiles(views, sizes)
    order, extent = preorder(views), (rows - first, rows)
    return Listed(
        _intervals(Preorder(order.enter[first:], order.leave[first:]), views.device),
        _intervals(order, views.device),
        _device_lists(forward, "query", extent, sizes.forward, views.device),
        _device_lists(backward, "key", extent, sizes.backward, views.device),
        rows,
    )


def _intervals(order: Preorder, device: torch.device) -> Tensor:
    """Kernels ask for the intervals of all rows of a tile, also of those past the last row."""
    pairs = np.stack(order, axis=1).ravel().astype(np.int32)
    return place(np.pad(pairs, (0, 2 * MOST_TILE_ROWS)), device)


def _device_lists(
    tiles: Tiles, by: Literal["query", "key"], rows: tuple[int, int], tile: Tile, device: torch.device
) -> DeviceLists:
    queries, keys = (ceil_div(count, size) for count, size in zip(rows, tile, strict=True))
    one, other, *counts = (
        (tiles.query, tiles.key, queries, keys) if by == "query" else (tiles.key, tiles.query, keys, queries)
    )
    partial, full = (lists(one[which], other[which], *counts) for which in (~tiles.full, tiles.full))

    def put(array: Int32) -> Tensor:
        return place(array, device)[None, None]

    return DeviceLists(put(partial.counts), put(partial.indices), put(full.counts), put(full.indices), tile)
