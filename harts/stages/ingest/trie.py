"""Sort trajectories by their tokens and measure what neighbours share (SPEC section 1)."""

from __future__ import annotations

import numpy as np

from harts.ir import CompactTrie, RolloutBatch
from harts.ir.base import Bool, Int64
from harts.stages.ingest.lcp_sort import lcp_sort


def build_trie(batch: RolloutBatch, shared_trained_token: str = "sum") -> CompactTrie:
    """Sort stably and lexicographically by token id, and keep adjacent LCPs.

    Sharing follows token ids alone: never text, group, turn or a declared parent.
    """
    order, lcp = lcp_sort(batch.tokens, batch.columns.offset)
    loss_mask = batch.columns.loss_mask
    if shared_trained_token == "once":
        loss_mask = owned(batch, order, lcp)
    return CompactTrie(batch, shared_trained_token, order, lcp, loss_mask)


def owned(batch: RolloutBatch, order: Int64, lcp: Int64) -> Bool:
    """Keep each shared trained token for the first trajectory of the batch that trains it, [S].

    Those that share a token are neighbours in sorted order. So its owner is the trajectory that is first both among
    those up to it and among those from it on, and two sweeps need memory for one trajectory, not for the trie.
    """
    mask = batch.columns.loss_mask.copy()
    _sweep(batch, order, lcp, mask)
    _sweep(batch, order[::-1], np.roll(lcp, -1)[::-1], mask)
    return mask


def _sweep(batch: RolloutBatch, order: Int64, lcp: Int64, mask: Bool) -> None:
    """Take from `mask` [S] what a trajectory visited before trains and whose number is lower.

    Args:
        order: trajectories in the order of the visit, [N].
        lcp: tokens that each shares with the one visited before it, [N]; 0 for the first.
    """
    columns = batch.columns
    length = columns.length[order]
    first = np.full(int(length.max()), len(order), dtype=np.int64)
    """Lowest number so far that trains each token of the trajectory at hand."""
    for i, size, shared in zip(order.tolist(), length.tolist(), lcp.tolist(), strict=True):
        span = slice(columns.offset[i], columns.offset[i + 1])
        first[shared:size] = len(order)
        np.minimum(first[:size], i, out=first[:size], where=columns.loss_mask[span])
        mask[span] &= first[:size] == i
