"""Synthetic microbatches to measure: the terms of a cost occur in them in unlike proportions.

A spec lists the segments of a microbatch as (parent or -1, tokens), parents first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harts.ir import Columns, RolloutBatch
from harts.ir.base import Int32
from harts.ir.runs import offsets

Spec = list[tuple[int, int]]
SIZES = 20
"""Microbatches."""
SPREAD = 16
"""Rows of the largest over those of the smallest."""
LEAST = 16
"""Rows of any microbatch."""
FAN = 16
"""Most children of a segment, and most trees."""


def specs(largest: int, chunk_size: int, fan: int, rng: np.random.Generator) -> list[Spec]:
    """Microbatches from `largest` rows down to a `SPREAD`-th of them, the kinds in turn; the same for equal arguments.

    Args:
        largest: rows of the largest, at least `LEAST`.
        chunk_size: tokens of a linear-attention chunk.
        fan: children that a segment may have: tokens of the vocabulary at most.
        rng: draws proportions.
    """
    kinds: list[Callable[[int, int, int, np.random.Generator], Spec]] = [_chains, _star, _binary, _comb]
    sizes = np.geomspace(max(LEAST, largest // SPREAD), largest, SIZES).astype(np.int64)
    return [kinds[i % len(kinds)](int(rows), chunk_size, min(fan, FAN), rng) for i, rows in enumerate(sizes)]


def held_out(index: int) -> bool:
    """Whether a microbatch judges the fit instead of entering it: a quarter, of every kind."""
    return index % 4 == index // 4 % 4


def _chains(rows: int, chunk_size: int, fan: int, rng: np.random.Generator) -> Spec:
    """Trajectories that share nothing: the fewer, the more pairs a row."""
    return [(-1, tokens) for tokens in _pieces(rows, int(rng.integers(1, fan + 1)))]


def _star(rows: int, chunk_size: int, fan: int, rng: np.random.Generator) -> Spec:
    """One prefix with many short branches or few long ones: replay, states, two rounds."""
    prefix = _end(int(rows * rng.uniform(0.2, 0.8)), chunk_size, rows - 2, rng)
    branches = int(rng.integers(2, max(2, fan) + 1))
    return [(-1, prefix), *((0, tokens) for tokens in _pieces(rows - prefix, branches))]


def _binary(rows: int, chunk_size: int, fan: int, rng: np.random.Generator) -> Spec:
    """Every segment forks in two and passes a chunk boundary, as deep as rows allow: a round for each level."""
    levels = max(1, (rows // (chunk_size + 1) + 1).bit_length() - 1)
    pieces = _pieces(rows, 2**levels - 1)
    return [((i - 1) // 2 if i else -1, tokens) for i, tokens in enumerate(pieces)]


def _comb(rows: int, chunk_size: int, fan: int, rng: np.random.Generator) -> Spec:
    """A spine with a short branch at each fork: many states in two rounds."""
    most = max(2, rows // (2 * chunk_size))
    teeth = int(rng.integers(most // 2, most + 1))
    pieces = _pieces(rows, 2 * teeth + 1)
    spec, spine, depth = [(-1, pieces[0])], 0, pieces[0]
    for i in range(teeth):
        both = pieces[2 * i + 1] + pieces[2 * i + 2]
        on = _end(depth + int(both * rng.uniform(0.5, 0.9)), chunk_size, depth + both - 1, rng) - depth
        spec += [(spine, max(1, on)), (spine, both - max(1, on))]
        spine, depth = len(spec) - 2, depth + max(1, on)
    return spec


def _end(wanted: int, chunk_size: int, most: int, rng: np.random.Generator) -> int:
    """Where a segment ends: near where it should, at a chunk boundary (no replay) or, more often, just before one."""
    boundary = wanted // chunk_size * chunk_size
    moved = int(rng.choice([wanted, boundary, boundary - 1, boundary - 1]))
    return min(max(1, moved), most)


def _pieces(rows: int, count: int) -> list[int]:
    """`rows` in `count` nearly equal parts of at least one, or fewer parts if there are not enough rows."""
    count = min(count, rows)
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def batch(found: list[Spec], vocabulary: int, rng: np.random.Generator) -> RolloutBatch:
    """The trajectories of all microbatches, each one a group; every token but a trajectory's first is trained."""
    paths: list[Int32] = []
    owner: list[int] = []
    for number, spec in enumerate(found):
        leaves = _leaves(spec, vocabulary, rng)
        paths += leaves
        owner += [number] * len(leaves)
    offset = offsets(np.array([len(path) for path in paths], dtype=np.int64))
    trained = np.ones(int(offset[-1]), dtype=np.bool_)
    trained[offset[:-1]] = False
    columns = Columns(
        names=tuple(f"synthetic {i}" for i in range(len(paths))),
        groups=tuple(f"microbatch {i}" for i in range(len(found))),
        offset=offset,
        group=np.array(owner, dtype=np.int32),
        loss_mask=trained,
        advantage=np.ones(len(paths)),
        old_logprobs=np.zeros(len(trained)),
        ref_logprobs=np.zeros(len(trained)),
    )
    return RolloutBatch("synthetic rollouts", np.concatenate(paths), columns)


def _leaves(spec: Spec, vocabulary: int, rng: np.random.Generator) -> list[Int32]:
    """Tokens of the path to each leaf. Siblings differ in their first token, which is their rank."""
    born: dict[int, int] = {}
    path: list[Int32] = []
    for parent, length in spec:
        tokens = rng.integers(0, vocabulary, length, dtype=np.int32)
        tokens[0] = born.get(parent, 0)
        born[parent] = int(tokens[0]) + 1
        path.append(tokens if parent < 0 else np.concatenate((path[parent], tokens)))
    return [path[i] for i in range(len(spec)) if i not in born]
