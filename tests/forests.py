"""Small rollout forests for tests: from token lists, from segment specs, and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from harts.ir import Columns, CompactTrie, RolloutBatch, SegmentTree
from harts.ir.runs import offsets
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.segments import segment_tree

Spec = Sequence[tuple[int, int]]
"""(parent or -1, tokens) of each segment, parents first."""


def batch_of(trajectories: Sequence[Sequence[int]], **columns: object) -> RolloutBatch:
    """A batch of token lists, every token but the first trained; columns by keyword replace the defaults."""
    length = np.array([len(tokens) for tokens in trajectories], dtype=np.int64)
    offset = offsets(length)
    mask = np.ones(int(offset[-1]), dtype=np.bool_)
    mask[offset[:-1]] = False
    count = len(trajectories)
    fields: dict[str, object] = {
        "names": tuple(f"t{i}" for i in range(count)),
        "groups": ("g",),
        "offset": offset,
        "group": np.zeros(count, dtype=np.int32),
        "loss_mask": mask,
    }
    tokens = np.array([token for tokens in trajectories for token in tokens], dtype=np.int32)
    return RolloutBatch("test", tokens, Columns(**(fields | columns)))  # type: ignore[arg-type]


def paths_of(spec: Spec, extra: Sequence[tuple[int, int]] = ()) -> list[list[int]]:
    """Token lists of every leaf of a spec, then of `extra` (segment, tokens used of it) as strict prefixes.

    Tokens differ wherever segments do: the first token of child number i of any segment is i + 1.
    """
    tokens: list[list[int]] = []
    born = [0] * (len(spec) + 1)
    for segment, (parent, length) in enumerate(spec):
        rank = born[parent]
        born[parent] += 1
        tokens.append([rank + 1] + [(7 * segment + 3 * j) % 11 + 1 for j in range(length - 1)])
    parents = {parent for parent, _ in spec}
    wanted = [(leaf, spec[leaf][1]) for leaf in range(len(spec)) if leaf not in parents]
    return [_path(spec, tokens, segment)[: _start(spec, segment) + used] for segment, used in [*wanted, *extra]]


def _path(spec: Spec, tokens: list[list[int]], segment: int) -> list[int]:
    found: list[int] = []
    while segment >= 0:
        found = tokens[segment] + found
        segment = spec[segment][0]
    return found


def _start(spec: Spec, segment: int) -> int:
    start, parent = 0, spec[segment][0]
    while parent >= 0:
        start += spec[parent][1]
        parent = spec[parent][0]
    return start


def trie_of(trajectories: Sequence[Sequence[int]], **columns: object) -> CompactTrie:
    return build_trie(batch_of(trajectories, **columns))


def tree_of(trajectories: Sequence[Sequence[int]], **columns: object) -> SegmentTree:
    """All trajectories as one microbatch."""
    trie = trie_of(trajectories, **columns)
    return segment_tree(trie, np.arange(len(trajectories)))


def tree_of_spec(spec: Spec, extra: Sequence[tuple[int, int]] = ()) -> SegmentTree:
    return tree_of(paths_of(spec, extra))


def random_spec(rng: random.Random, chunk: int, roots: int = 2, forks: int = 6) -> list[tuple[int, int]]:
    """Forks inside chunks, on boundaries, one before and one after; one-token segments; fan-out up to 4."""
    spec: list[tuple[int, int]] = []
    open_ends: list[tuple[int, int]] = []
    for _ in range(roots):
        length = _length(rng, 0, chunk)
        spec.append((-1, length))
        open_ends.append((len(spec) - 1, length))
    for _ in range(forks):
        segment, end = open_ends.pop(rng.randrange(len(open_ends)))
        for _ in range(rng.choice((2, 2, 3, 4))):
            length = _length(rng, end, chunk)
            spec.append((segment, length))
            open_ends.append((len(spec) - 1, end + length))
    return spec


def _length(rng: random.Random, start: int, chunk: int) -> int:
    kind = rng.choice(("inside", "boundary", "before", "after", "long", "one"))
    if kind == "inside":
        return rng.randint(1, chunk)
    if kind == "long":
        return rng.randint(chunk, 3 * chunk)
    if kind == "one":
        return 1
    target = {"boundary": 0, "before": -1, "after": 1}[kind] + chunk - start % chunk
    return target if target > 0 else target + chunk


def random_trajectories(rng: random.Random, chunk: int, roots: int = 2, forks: int = 6) -> list[list[int]]:
    """Leaves of a random spec, some strict prefixes and duplicates, shuffled."""
    spec = random_spec(rng, chunk, roots, forks)
    extra = [(v, rng.randint(1, spec[v][1])) for v in rng.sample(range(len(spec)), k=min(2, len(spec)))]
    paths = paths_of(spec, extra)
    paths += [list(rng.choice(paths))]
    rng.shuffle(paths)
    return paths
