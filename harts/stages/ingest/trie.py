"""Sort trajectories by their tokens and measure what neighbours share (SPEC section 1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harts.ir import CompactTrie, RolloutBatch
from harts.ir.base import Bool, Int32, Int64


def build_trie(batch: RolloutBatch, shared_trained_token: str = "sum") -> CompactTrie:
    """Sort stably and lexicographically by token id, and keep adjacent LCPs.

    Sharing follows token ids alone: never text, group, turn or a declared parent.
    """
    order = lexicographic_order(batch.tokens, batch.columns.offset)
    lcp = adjacent_lcp(batch.tokens, batch.columns.offset, order)
    loss_mask = batch.columns.loss_mask
    if shared_trained_token == "once":
        loss_mask = owned(batch, order, lcp)
    return CompactTrie(batch, shared_trained_token, order, lcp, loss_mask)


def lexicographic_order(tokens: Int32, offset: Int64) -> Int64:
    """Stable order of the trajectories by their tokens, [N]. Big-endian bytes compare as the tokens do."""
    order = sorted(range(len(offset) - 1), key=lambda i: tokens[offset[i] : offset[i + 1]].astype(">u4").tobytes())
    return np.array(order, dtype=np.int64)


def adjacent_lcp(tokens: Int32, offset: Int64, order: Int64) -> Int64:
    """LCP of each trajectory in sorted order with the one before it, 0 for the first, [N]."""
    lcp = np.zeros(len(order), dtype=np.int64)
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        lcp[i] = common_prefix(tokens[offset[a] : offset[a + 1]], tokens[offset[b] : offset[b + 1]])
    return lcp


def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix, compared in blocks that grow from 256 tokens."""
    limit, done, block = min(len(a), len(b)), 0, 256
    while done < limit:
        stop = min(done + block, limit)
        differs = a[done:stop] != b[done:stop]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, block = stop, block * 4
    return limit


def owned(batch: RolloutBatch, order: Int64, lcp: Int64) -> Bool:
    """Keep each shared trained token for the first trajectory of the batch that trains it, [S]."""
    columns = batch.columns
    length = columns.length[order]
    owner = np.full(int((length - lcp).sum()), len(columns), dtype=np.int64)
    for i, path in zip(order.tolist(), _paths(length, lcp), strict=True):
        trained = path[columns.loss_mask[columns.offset[i] : columns.offset[i + 1]]]
        owner[trained] = np.minimum(owner[trained], i)
    mask = columns.loss_mask.copy()
    for i, path in zip(order.tolist(), _paths(length, lcp), strict=True):
        mask[columns.offset[i] : columns.offset[i + 1]] &= owner[path] == i
    return mask


def _paths(length: Int64, lcp: Int64) -> Iterator[Int64]:
    """Numbers of the trie nodes of each trajectory in sorted order; one buffer, overwritten by the next."""
    path = np.empty(int(length.max()), dtype=np.int64)
    used = 0
    for size, shared in zip(length.tolist(), lcp.tolist(), strict=True):
        path[shared:size] = np.arange(used, used + size - shared)
        used += size - shared
        yield path[:size]
