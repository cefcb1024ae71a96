"""A small generator (xorshift64) whose numbers are the same on every machine and in every release of numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harts.compiled import compiled

Rng = NDArray[np.uint64]
"""State, [1]; every draw changes it."""


def seeded(seed: int) -> Rng:
    """The generator of a seed. States of near seeds are far apart, and none is 0, which would stay 0."""
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    return np.array([mixed or 1], dtype=np.uint64)


@compiled
def below(rng: Rng, limit: int) -> int:
    """A number from 0 to limit - 1."""
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(limit)))
