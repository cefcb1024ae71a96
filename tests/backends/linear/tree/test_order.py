"""Launch orders: nothing waits for what starts later, and long chains start first."""

import numpy as np
import pytest

from harts.backends.linear.tree.order import Chains, backward_order, forward_order


def independent(*chunks: int) -> Chains:
    none = np.full(len(chunks), -1, dtype=np.int64)
    return Chains(np.array(chunks, dtype=np.int64), none, none)


def random_chains(seed: int, count: int = 40) -> Chains:
    """Trees in which a consumer starts after at least one chunk of its producer, at times after all of them."""
    draw = np.random.default_rng(seed)
    chunks = draw.integers(1, 6, count)
    producer = np.array([draw.integers(-1, n) if n else -1 for n in range(count)])
    after = np.where(producer >= 0, draw.integers(1, chunks[producer] + 1), -1)
    return Chains(chunks, producer, after)


def consumers(chains: Chains, n: int) -> list[int]:
    return np.flatnonzero(chains.producer == n).tolist()


def still_ahead(chains: Chains, n: int) -> int:
    """Chunks on the longest chain that begins with a sequence."""
    return max([int(chains.chunks[n]), *(int(chains.after[c]) + still_ahead(chains, c) for c in consumers(chains, n))])


def up_to_its_end(chains: Chains, n: int) -> int:
    """Chunks from the start of a chain to the end of a sequence."""
    total = int(chains.chunks[n])
    while (up := int(chains.producer[n])) >= 0:
        total += int(chains.after[n])
        n = up
    return total


@pytest.mark.parametrize("seed", range(20))
def test_forward_order_is_by_the_chain_ahead_and_lists_producers_first(seed):
    chains = random_chains(seed)
    order = forward_order(chains).tolist()
    assert order == sorted(range(len(order)), key=lambda n: (-still_ahead(chains, n), n))
    place = {n: i for i, n in enumerate(order)}
    assert all(place[producer] < place[n] for n, producer in enumerate(chains.producer.tolist()) if producer >= 0)


@pytest.mark.parametrize("seed", range(20))
def test_backward_order_lists_the_longest_chain_of_those_whose_consumers_are_listed(seed):
    chains = random_chains(seed)
    listed: list[int] = []
    for _ in chains.chunks:
        ready = [n for n in range(len(chains.chunks)) if n not in listed and set(consumers(chains, n)).issubset(listed)]
        listed.append(min(ready, key=lambda n: (-up_to_its_end(chains, n), n)))
    assert backward_order(chains).tolist() == listed


@pytest.mark.parametrize("order", [forward_order, backward_order])
def test_independent_sequences_start_with_the_longest_and_equal_ones_in_their_order(order):
    assert order(independent(2, 7, 2, 9, 7)).tolist() == [3, 1, 4, 0, 2]
    assert order(independent(3, 3, 3)).tolist() == [0, 1, 2]


def test_a_short_producer_of_a_long_consumer_starts_before_a_long_sequence():
    chains = Chains(np.array([6, 2, 5]), np.array([-1, -1, 1]), np.array([-1, -1, 2]))
    assert forward_order(chains).tolist() == [1, 0, 2]
    assert backward_order(chains).tolist() == [2, 0, 1]
