"""Partitions measured without LCPs, and batches of every shape."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

from harts.ir import CompactTrie
from tests.forests import random_trajectories, trie_of

Tokens = Sequence[int]


def sorted_tokens(trie: CompactTrie) -> list[tuple[int, ...]]:
    """Token lists at each sorted position."""
    offset, tokens = trie.batch.columns.offset, trie.batch.tokens
    return [tuple(tokens[offset[i] : offset[i + 1]].tolist()) for i in trie.order]


def compact_work(trajectories: Iterable[Tokens]) -> int:
    """Unique prefixes, counted one by one."""
    return len({tuple(x[:n]) for x in trajectories for n in range(1, len(x) + 1)})


def works_of(trie: CompactTrie, label: np.ndarray) -> list[int]:
    """Work of microbatches 0..K-1, counted naively."""
    tokens = sorted_tokens(trie)
    count = max(label.tolist()) + 1
    return [compact_work(tokens[i] for i in np.flatnonzero(label == k)) for k in range(count)]


def assert_partition(trie: CompactTrie, label: np.ndarray, capacity: int | None, replicas: int) -> None:
    """Every trajectory once, no empty microbatch, capacity held, D divides K."""
    count = max(label.tolist()) + 1
    assert len(label) == len(trie.order)
    assert set(label.tolist()) == set(range(count))
    assert count % replicas == 0
    if capacity is not None:
        assert max(works_of(trie, label)) <= capacity


def contiguous_partitions(count: int, parts: int) -> Iterator[list[range]]:
    """All ways to cut 0..count-1 into that many intervals."""
    for cuts in combinations(range(1, count), parts - 1):
        edges = [0, *cuts, count]
        yield [range(a, b) for a, b in pairwise(edges)]


def shapes(rng: random.Random) -> dict[str, list[list[int]]]:
    """One small batch of each shape."""
    n = rng.randint(2, 14)
    trunk = [rng.randint(1, 3) for _ in range(rng.randint(1, 9))]
    sizes = [rng.randint(1, 9) for _ in range(n)]
    some = [[rng.randint(1, 2) for _ in range(size)] for size in sizes]
    found = {
        "forest": random_trajectories(rng, chunk=4, roots=rng.randint(1, 3), forks=rng.randint(1, 5)),
        "one token": [[rng.randint(1, 4)] for _ in range(n)],
        "duplicates": [list(rng.choice(some)) for _ in range(n)],
        "no sharing": [[i + 1] * size for i, size in enumerate(sizes)],
        "star": [trunk + [i + 5] * size for i, size in enumerate(sizes)],
        "caterpillar": [[1] * i + [2] * size for i, size in enumerate(sizes)],
        "all equal": [trunk] * n,
        "prefixes": [(trunk * 9)[:size] for size in sizes],
        "dense": some,
    }
    for trajectories in found.values():
        rng.shuffle(trajectories)
    return found


def tries(seeds: Iterable[int]) -> Iterator[tuple[str, random.Random, CompactTrie]]:
    """Every shape for every seed, with a name to find it again."""
    for seed in seeds:
        rng = random.Random(seed)
        for name, trajectories in shapes(rng).items():
            yield f"{name}, seed {seed}", rng, trie_of(trajectories)


def some_capacity(rng: random.Random, trie: CompactTrie) -> int:
    """From the tightest that can hold every trajectory to more than all need."""
    longest = int(trie.length.max())
    return rng.choice((longest, longest + 1, rng.randint(longest, trie.compact_tokens), trie.compact_tokens + 3))
