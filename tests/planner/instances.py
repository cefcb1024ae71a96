"""Small steps of every shape, by seed, for which the best partition can be proven."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from harts.ir import CompactTrie
from tests.forests import paths_of, trie_of

COUNT = 200
"""Instances of the suite."""

Segments = list[tuple[int, int]]
"""(parent or -1, tokens), parents first; each leaf is a trajectory."""


class Instance(NamedTuple):
    """Trajectories to be put into microbatches."""

    name: str
    tokens: list[list[int]]
    capacity: int
    """Compact tokens of a microbatch."""
    multiple: int
    """What the number of microbatches is a multiple of."""

    @property
    def trie(self) -> CompactTrie:
        """The trajectories in sorted order."""
        return trie_of(self.tokens)

    def digest(self) -> str:
        """Of all that the optimum depends on."""
        trie = self.trie
        told = [trie.length.tolist(), trie.lcp.tolist(), self.capacity, self.multiple]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def instances() -> tuple[Instance, ...]:
    """All of them, the shapes taking turns."""
    return tuple(instance(seed) for seed in range(COUNT))


@cache
def instance(seed: int) -> Instance:
    """6 to 18 trajectories for 2 to 6 microbatches or so; D is 1, at times 2."""
    rng = random.Random(seed)
    names = sorted(SHAPES)
    name = names[seed % len(names)]
    while True:
        tokens = SHAPES[name](rng, round(rng.triangular(6, 18, 18)))
        capacity = round(tight_capacity(rng, tokens, rng.randint(2, 5)) * rng.choice((1, 1, 1.02, 1.1)))
        if capacity < trie_of(tokens).compact_tokens:
            break
    rng.shuffle(tokens)
    return Instance(f"{name}, seed {seed}", tokens, capacity, multiple=2 if seed % 4 == 3 else 1)


def tight_capacity(rng: random.Random, tokens: list[list[int]], microbatches: int) -> int:
    """One that so many microbatches need to be well packed for: the least of some random balanced partitions."""
    prefixes_of = [{tuple(path[: end + 1]) for end in range(len(path))} for path in tokens]
    least = sum(map(len, tokens))
    for _ in range(20):
        held: list[set[tuple[int, ...]]] = [set() for _ in range(microbatches)]
        for path in sorted(prefixes_of, key=lambda path: len(path) * rng.uniform(0.5, 1), reverse=True):
            chosen = min(held, key=lambda inside: len(inside | path))
            chosen |= path
        least = min(least, max(map(len, held)))
    return least


def star(rng: random.Random, count: int) -> list[list[int]]:
    """One prompt, answers of their own."""
    return paths_of([(-1, rng.randint(1, 40)), *((0, rng.randint(1, 60)) for _ in range(count))])


def chain(rng: random.Random, count: int) -> list[list[int]]:
    """An agent's turns: at each of them a side leaf is left behind, and the chain goes on."""
    return paths_of(_chain(rng, count, [(-1, rng.randint(5, 30))], 0))


def chains(rng: random.Random, count: int) -> list[list[int]]:
    """Several sessions of one task."""
    segments: Segments = [(-1, rng.randint(1, 10))]
    left = count - 1
    while left > 0:
        turns = min(left, rng.randint(2, 7))
        segments.append((0, rng.randint(5, 30)))
        segments = _chain(rng, turns, segments, len(segments) - 1)
        left -= turns
    return paths_of([*segments, (0, rng.randint(5, 30))])


def _chain(rng: random.Random, turns: int, segments: Segments, under: int) -> Segments:
    grown = list(segments)
    for _ in range(turns - 1):
        grown += [(under, rng.randint(5, 40)), (under, rng.randint(1, 12))]
        under = len(grown) - 1
    return grown


def binary(rng: random.Random, count: int) -> list[list[int]]:
    """Forks in two, whichever branch."""
    segments: Segments = [(-1, rng.randint(1, 20))]
    ends = [0]
    while len(ends) < count:
        under = ends.pop(rng.randrange(len(ends)))
        for _ in range(2):
            segments.append((under, rng.randint(1, 30)))
            ends.append(len(segments) - 1)
    return paths_of(segments)


def groups(rng: random.Random, count: int) -> list[list[int]]:
    """Trees apart, each a prompt with several answers."""
    segments: Segments = []
    left = count
    while left > 0:
        answers = min(left, rng.randint(2, 6))
        segments.append((-1, rng.randint(1, 50)))
        prompt = len(segments) - 1
        segments += [(prompt, rng.randint(1, 40)) for _ in range(answers)]
        left -= answers
    return paths_of(segments)


def two_levels(rng: random.Random, count: int) -> list[list[int]]:
    """The same below one common prompt."""
    segments: Segments = [(-1, rng.randint(1, 30))]
    left = count
    while left > 0:
        answers = min(left, rng.randint(2, 6))
        segments.append((0, rng.randint(1, 40)))
        prompt = len(segments) - 1
        segments += [(prompt, rng.randint(1, 30)) for _ in range(answers)]
        left -= answers
    return paths_of(segments)


def sand(rng: random.Random, count: int) -> list[list[int]]:
    """Tiny answers below a prompt of their own, beside a few long trajectories."""
    large = rng.randint(2, 4)
    segments: Segments = [(-1, rng.randint(1, 5)), (0, rng.randint(20, 40))]
    segments += [(1, rng.randint(1, 4)) for _ in range(count - large)]
    segments += [(0, rng.randint(30, 90)) for _ in range(large)]
    return paths_of(segments)


def duplicates(rng: random.Random, count: int) -> list[list[int]]:
    """Equal trajectories among others."""
    some = two_levels(rng, max(3, count // 2))
    return some + [list(rng.choice(some)) for _ in range(count - len(some))]


def prefixes(rng: random.Random, count: int) -> list[list[int]]:
    """Every request of a few sessions: trajectories that end inside others."""
    some = star(rng, max(2, count // 4))
    cut = [list(rng.choice(some)) for _ in range(count - len(some))]
    return some + [path[: rng.randint(1, len(path))] for path in cut]


SHAPES: dict[str, Callable[[random.Random, int], list[list[int]]]] = {
    "star": star,
    "chain": chain,
    "chains": chains,
    "binary": binary,
    "groups": groups,
    "two levels": two_levels,
    "sand": sand,
    "duplicates": duplicates,
    "prefixes": prefixes,
}
