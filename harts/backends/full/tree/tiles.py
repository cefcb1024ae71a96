"""Tiles of the score matrix that hold a visible pair, from runs of rows: never row by row."""

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


class _Strips(NamedTuple):
    """Rows of one branch in one tile of queries, and a run of rows that they see; sorted by tile."""

    tile: Int64
    top: Int64
    """First query row."""
    rows: Int64
    """Query rows."""
    begin: Int64
    """First key row that all of them see."""
    end: Int64
    """One past the last such row; from there on a query of the branch's own run sees keys up to itself."""
    own: Bool
    """Whether it is the branch's own run."""

    def part(self, some: slice) -> _Strips:
        """Some of them."""
        return _Strips(
            self.tile[some], self.top[some], self.rows[some], self.begin[some], self.end[some], self.own[some]
        )


CELLS = 2**22
"""Tiles whose pairs are counted at a time."""


def visible_tiles(views: AttentionViews, tile_queries: int, tile_keys: int) -> Tiles:
    """Find the tiles of `tile_queries` x `tile_keys` rows that hold a visible pair.

    Pairs are counted over the runs that each branch sees; a tile is full if the count is its area (at the end of the
    rows: of the part that is rows). Time is that of the strips and of a sum over all tiles of the square, `CELLS` at a
    time: 0.4 s at half a million rows.
    """
    strips = _strips(views, tile_queries)
    rows = int(views.cu_q[-1])
    down, across = -(-rows // tile_queries), -(-rows // tile_keys)
    height = np.minimum(rows - np.arange(down) * tile_queries, tile_queries)
    width = np.minimum(rows - np.arange(across) * tile_keys, tile_keys)
    step = max(1, CELLS // across)
    found = []
    for first in range(0, down, step):
        last = min(first + step, down)
        some = slice(*np.searchsorted(strips.tile, [first, last]))
        pairs = _pairs(strips.part(some), first, last - first, tile_keys, across)
        query, key = np.nonzero(pairs)
        full = pairs[query, key] == height[first + query] * width[key]
        found.append(Tiles(query + first, key, full))
    return Tiles(*(np.concatenate(each) for each in zip(*found, strict=True)))


def lists(one: Int64, other: Int64, count: int, others: int) -> Lists:
    """For each of `count` tiles of one side, list those of the `others` of the other side that it is paired with."""
    order = np.lexsort((other, one))
    counts = np.bincount(one, minlength=count)
    width = max(min(2, others), int(counts.max(initial=0)))  # one of several would be taken for all of them
    index = np.zeros((count, width), dtype=np.int32)
    index[one[order], expand_runs(np.zeros(count, dtype=np.int64), counts)] = other[order]
    return Lists(counts.astype(np.int32), index)


def _strips(views: AttentionViews, tile_queries: int) -> _Strips:
    runs = np.diff(views.run_offset)
    branch = np.repeat(np.arange(len(runs)), runs)
    own = np.zeros(len(branch), dtype=np.bool_)
    own[views.run_offset[1:] - 1] = True
    low, high = views.cu_q[:-1][branch], views.cu_q[1:][branch]
    tiles = (high - 1) // tile_queries - low // tile_queries + 1
    run, tile = np.repeat(np.arange(len(branch)), tiles), expand_runs(low // tile_queries, tiles)
    order = np.argsort(tile, kind="stable")
    run, tile = run[order], tile[order]
    top = np.maximum(tile * tile_queries, low[run])
    bottom = np.minimum((tile + 1) * tile_queries, high[run])
    begin = views.run_row[run]
    end = np.where(own[run], top, begin + views.run_length[run])
    return _Strips(tile, top, bottom - top, begin, end, own[run])


def _pairs(x: _Strips, first: int, down: int, tile_keys: int, across: int) -> Int64:
    """Visible pairs of each tile of `down` rows of tiles from the first one, [down, across]."""
    line = (x.tile - first) * (across + 1)  # of a grid with one more column, where differences end
    left, right = x.begin // tile_keys, x.end // tile_keys
    # where columns of the run begin and end, as differences between tiles: the part of the first tile, then whole ones
    parts = [
        (line + left, x.rows * ((left + 1) * tile_keys - x.begin)),
        (line + left + 1, x.rows * (x.begin - left * tile_keys)),
        (line + right, -x.rows * ((right + 1) * tile_keys - x.end)),
        (line + np.minimum(right + 1, across), -x.rows * (x.end - right * tile_keys)),
    ]
    place, change = (np.concatenate(each) for each in zip(*parts, strict=True))
    grid = np.bincount(place, weights=change, minlength=down * (across + 1)).reshape(down, across + 1)
    pairs: Int64 = np.cumsum(grid, axis=1)[:, :across].astype(np.int64)
    np.add.at(pairs, *_below_diagonal(x, first, tile_keys))
    return pairs


def _below_diagonal(x: _Strips, first: int, tile_keys: int) -> tuple[tuple[Int64, Int64], Int64]:
    """Tiles that the causal parts of strips touch, and their pairs."""
    top, rows, tile = x.top[x.own], x.rows[x.own], x.tile[x.own] - first
    left = top // tile_keys
    tiles = (top + rows - 1) // tile_keys - left + 1
    strip, key = np.repeat(np.arange(len(top)), tiles), expand_runs(left, tiles)
    begin = np.maximum(key * tile_keys, top[strip])
    end = np.minimum((key + 1) * tile_keys, top[strip] + rows[strip])
    after = top[strip] + rows[strip] - begin  # queries from the first key on
    return (tile[strip], key), _triangle(after, end - begin)


def _triangle(queries: Int64, keys: Int64) -> Int64:
    """Pairs of some keys and the queries that begin at the first of them, each of which sees keys up to itself."""
    return keys * (keys + 1) // 2 + (queries - keys) * keys
