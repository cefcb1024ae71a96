"""The trie of actual token prefixes, as a sorted order and adjacent longest common prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np

from harts.ir.base import Bool, Dims, Int64, Invariant, Value
from harts.ir.lcp import LcpIndex
from harts.ir.rollout_batch import RolloutBatch


@dataclass(frozen=True, eq=False, repr=False)
class CompactTrie(Value):
    """N trajectories in stable lexicographic order. C = sum(length - lcp) is the number of unique prefixes."""

    kind = "compact_trie"

    batch: RolloutBatch
    shared_trained_token: str
    """`sum`: a trained token shared by k trajectories has k loss terms. `once`: one, the first trajectory's."""
    order: Annotated[Int64, Dims("N")]
    """Trajectory at each sorted position."""
    lcp: Annotated[Int64, Dims("N")]
    """Tokens shared with the trajectory before it; lcp[0] = 0."""
    loss_mask: Annotated[Bool, Dims("S")]
    """Trained tokens of the batch, in its order, after `shared_trained_token`."""

    @property
    def length(self) -> Int64:
        """Tokens of each trajectory in sorted order, [N]."""
        return self.batch.columns.length[self.order]

    @property
    def semantic_tokens(self) -> int:
        """S."""
        return len(self.batch.tokens)

    @property
    def compact_tokens(self) -> int:
        """C, if all trajectories were one microbatch."""
        return int(self.semantic_tokens - self.lcp.sum())

    @cached_property
    def index(self) -> LcpIndex:
        """LCP of any pair and work of any interval of sorted positions."""
        return LcpIndex(self.length, self.lcp)

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("order", np.sort(self.order) != np.arange(len(self.order)), "must be a permutation")
        length = self.length
        yield Invariant("lcp", self.lcp[:1] != 0, "the first trajectory shares with none")
        yield Invariant("lcp", self.lcp < 0, "must not be negative")
        shorter = np.minimum(length, np.concatenate(([0], length[:-1])))
        yield Invariant("lcp", self.lcp > shorter, "must not exceed either trajectory")
        yield Invariant("lcp", self._misordered(), "must be the exact LCP with the trajectory before, in sorted order")
        extra = self.loss_mask & ~self.batch.columns.loss_mask
        yield Invariant("loss_mask", extra, "must not train a token that the batch does not")
        known = self.shared_trained_token in ("sum", "once")
        yield Invariant("shared_trained_token", not known, "must be sum or once")

    def _misordered(self) -> Bool:
        """Where the tokens right after the LCP do not ascend, or the tokens before it differ."""
        tokens, offset = self.batch.tokens, self.batch.columns.offset
        bad = np.zeros(len(self.order), dtype=np.bool_)
        for i in range(1, len(self.order)):
            before, here, shared = self.order[i - 1], self.order[i], self.lcp[i]
            a = tokens[offset[before] : offset[before + 1]]
            b = tokens[offset[here] : offset[here + 1]]
            ascends = len(a) == shared or (len(b) > shared and a[shared] < b[shared])
            bad[i] = not ascends or not np.array_equal(a[:shared], b[:shared])
        return bad
