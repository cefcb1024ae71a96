"""Sort trajectories by their tokens and measure what neighbours share (SPEC section 1)."""

from __future__ import annotations

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
    data = tokens.astype(">u4").tobytes()
    bounds = (offset * 4).tolist()
    order = sorted(range(len(offset) - 1), key=lambda i: data[bounds[i] : bounds[i + 1]])
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
    nodes = _trie_nodes(columns.length[order], columns.offset[order], lcp, len(batch.tokens))
    owner = np.full(int((columns.length[order] - lcp).sum()), len(columns), dtype=np.int64)
    for i in reversed(range(len(columns))):
        span = slice(columns.offset[i], columns.offset[i + 1])
        owner[nodes[span][columns.loss_mask[span]]] = i
    mine = owner[nodes] == np.repeat(np.arange(len(columns)), columns.length)
    return np.asarray(columns.loss_mask & mine)


def _trie_nodes(length: Int64, first: Int64, lcp: Int64, total: int) -> Int64:
    """Number of the trie node of every semantic position of the batch, [S]."""
    nodes = np.empty(total, dtype=np.int64)
    path = np.empty(int(length.max()), dtype=np.int64)
    used = 0
    for size, begin, shared in zip(length.tolist(), first.tolist(), lcp.tolist(), strict=True):
        path[shared:size] = np.arange(used, used + size - shared)
        used += size - shared
        nodes[begin : begin + size] = path[:size]
    return nodes
