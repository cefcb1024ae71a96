"""Tiles of the score matrix that hold a visible pair, from runs of rows: never row by row, never all tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Bool, Int32, Int64
from harts.ir.runs import expand_runs


class Tiles(NamedTuple):
    """Tiles with a visible pair, in the order of their queries, then of their keys; N tiles."""

    query: Int64
    """Which tile of query rows, [N]."""
    key: Int64
    """Which tile of key rows, [N]."""
    full: Bool
    """Whether every query sees every key, [N]."""


class Lists(NamedTuple):
    """For each tile of one side the tiles of the other side, ascending; M tiles, at most W of the other side each."""

    counts: Int32
    """[M]."""
    indices: Int32
    """0 past the count, [M, W]."""


class _Rectangles(NamedTuple):
    """Runs of rows that see runs of rows; where both begin alike, a query sees keys up to itself."""

    query: Int64
    queries: Int64
    key: Int64
    keys: Int64
    causal: Bool


def visible_tiles(views: AttentionViews, tile_queries: int, tile_keys: int) -> Tiles:
    """Find the tiles of `tile_queries` x `tile_keys` rows that hold a visible pair.

    Pairs are counted over the runs that each branch sees; a tile is full if the count is its area (at the end of the
    rows: of the part that is rows).
    """
    rectangles = _rectangles(views)
    rows = int(views.cu_q[-1])
    across = -(-rows // tile_keys)
    which, query, key = _tiles_of(rectangles, tile_queries, tile_keys)
    pairs = _visible_pairs(rectangles, which, query, key, (tile_queries, tile_keys))
    tile, place = np.unique((query * across + key)[pairs > 0], return_inverse=True)
    seen = np.zeros(len(tile), dtype=np.int64)
    np.add.at(seen, place, pairs[pairs > 0])
    query, key = np.divmod(tile, across)
    area = np.minimum(rows - query * tile_queries, tile_queries) * np.minimum(rows - key * tile_keys, tile_keys)
    return Tiles(query, key, seen == area)


def lists(one: Int64, other: Int64, count: int) -> Lists:
    """For each of `count` tiles of one side, list those of the other side that it is paired with."""
    order = np.lexsort((other, one))
    counts = np.bincount(one, minlength=count)
    width = max(2, int(counts.max(initial=0)))  # a dimension of one would be taken for a broadcast one
    index = np.zeros((count, width), dtype=np.int32)
    index[one[order], expand_runs(np.zeros(count, dtype=np.int64), counts)] = other[order]
    return Lists(counts.astype(np.int32), index)


def _rectangles(views: AttentionViews) -> _Rectangles:
    runs = np.diff(views.run_offset)
    branch = np.repeat(np.arange(len(runs)), runs)
    query, queries = views.cu_q[:-1][branch], np.diff(views.cu_q)[branch]
    causal = np.zeros(len(branch), dtype=np.bool_)
    causal[views.run_offset[1:] - 1] = True
    return _Rectangles(query, queries, views.run_row, views.run_length, causal)


def _tiles_of(x: _Rectangles, tile_queries: int, tile_keys: int) -> tuple[Int64, Int64, Int64]:
    """Rectangle, tile of queries and tile of keys of every tile that a rectangle touches."""
    first, last = x.query // tile_queries, (x.query + x.queries - 1) // tile_queries
    left, right = x.key // tile_keys, (x.key + x.keys - 1) // tile_keys
    down = last - first + 1
    which = np.repeat(np.arange(len(down)), down)
    query = expand_runs(first, down)
    # tiles right of the diagonal hold nothing
    reach = (np.minimum((query + 1) * tile_queries, (x.query + x.queries)[which]) - 1) // tile_keys
    right = np.where(x.causal[which], np.minimum(right[which], reach), right[which])
    across = right - left[which] + 1
    return np.repeat(which, across), np.repeat(query, across), expand_runs(left[which], across)


def _visible_pairs(x: _Rectangles, which: Int64, query: Int64, key: Int64, tile: tuple[int, int]) -> Int64:
    """Visible pairs of each rectangle's part in a tile of queries and keys."""
    top = np.maximum(query * tile[0], x.query[which])
    bottom = np.minimum((query + 1) * tile[0], (x.query + x.queries)[which])
    left = np.maximum(key * tile[1], x.key[which])
    right = np.minimum((key + 1) * tile[1], (x.key + x.keys)[which])
    below: Int64 = _triangle(bottom - left, right - left) - _triangle(top - left, right - left)
    pairs: Int64 = np.where(x.causal[which], below, (bottom - top) * (right - left))
    return pairs


def _triangle(queries: Int64, keys: Int64) -> Int64:
    """Pairs that the first queries see of some keys, query i of them keys 0..i."""
    rising: Int64 = np.clip(queries, 0, keys)
    beyond: Int64 = np.maximum(queries - keys, 0) * keys
    return rising * (rising + 1) // 2 + beyond
