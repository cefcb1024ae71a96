"""In which order sequences are started, so that none waits for one that has not been started.

Work is counted in chunks, which a sequence walks one after the other.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from harts.ir.base import Int64


class Chains(NamedTuple):
    """What waits for what; producers have lower numbers than their consumers. N sequences."""

    chunks: Int64
    """Chunks of each sequence, [N]."""
    producer: Int64
    """Sequence that each one starts from, -1 is none, [N]."""
    after: Int64
    """Chunks of the producer that come before, [N]."""


def forward_order(chains: Chains) -> Int64:
    """Sequences by the longest chain of chunks that begins with them, longest first.

    A producer's chain is longer than that of each of its consumers, so that it comes before them.
    """
    left = chains.chunks.copy()
    for n in np.flatnonzero(chains.producer >= 0)[::-1].tolist():
        producer = int(chains.producer[n])
        left[producer] = max(left[producer], chains.after[n] + left[n])
    return np.argsort(-left, kind="stable")


def backward_order(chains: Chains) -> Int64:
    """Sequences whose consumers have all been listed, by the chain that ends with them, longest first."""
    chain = chains.chunks.copy()
    waiting = np.zeros(len(chain), dtype=np.int64)
    for n in np.flatnonzero(chains.producer >= 0).tolist():
        producer = int(chains.producer[n])
        chain[n] += chain[producer] - chains.chunks[producer] + chains.after[n]
        waiting[producer] += 1
    ready = [(-int(chain[n]), int(n)) for n in np.flatnonzero(waiting == 0)]
    heapq.heapify(ready)
    order = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(n)
        producer = int(chains.producer[n])
        if producer >= 0:
            waiting[producer] -= 1
            if not waiting[producer]:
                heapq.heappush(ready, (-int(chain[producer]), producer))
    return np.array(order, dtype=np.int64)
