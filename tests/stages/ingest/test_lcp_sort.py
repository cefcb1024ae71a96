"""The compiled merge sort against Python's stable sort and LCPs counted token by token."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.ir.base import Int32, Int64
from harts.ir.runs import offsets
from harts.stages.ingest.lcp_sort import BLOCK, common_prefix, lcp_sort
from tests.forests import random_trajectories

LAST_ID = 2**31 - 1


def flat(paths: list[list[int]]) -> tuple[Int32, Int64]:
    tokens = np.array([token for path in paths for token in path], dtype=np.int32)
    return tokens, offsets(np.array([len(path) for path in paths], dtype=np.int64))


def naive(paths: list[list[int]]) -> tuple[list[int], list[int]]:
    order = sorted(range(len(paths)), key=paths.__getitem__)
    lcp = [naive_prefix(paths[a], paths[b]) for a, b in pairwise(order)]
    return order, [0, *lcp] if paths else []


def naive_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def agrees(paths: list[list[int]]) -> None:
    order, lcp = lcp_sort(*flat(paths))
    assert order.dtype == lcp.dtype == np.int64
    assert (order.tolist(), lcp.tolist()) == naive(paths)


ids = st.sampled_from([0, 1, 255, 256, 65536, LAST_ID - 1, LAST_ID])


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.lists(ids, min_size=1, max_size=6), max_size=20))
def test_short_trajectories_of_few_ids(paths: list[list[int]]) -> None:
    agrees(paths)


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.integers(0, LAST_ID), max_size=40))
def test_one_token_trajectories(tokens: list[int]) -> None:
    agrees([[token] for token in tokens])


@pytest.mark.parametrize("seed", range(40))
def test_random_forests_with_prefixes_and_duplicates(seed: int) -> None:
    rng = random.Random(seed)
    agrees(random_trajectories(rng, 8, roots=rng.randint(1, 4), forks=rng.randint(0, 12)))


@pytest.mark.parametrize("seed", range(20))
def test_lcps_around_the_ends_of_compared_blocks(seed: int) -> None:
    rng = random.Random(seed)
    trunk = [rng.randrange(LAST_ID) for _ in range(4 * BLOCK)]
    cuts = [k * BLOCK + d for k in range(4) for d in (-1, 0, 1) if k * BLOCK + d > 0]
    paths = [trunk[:cut] + [rng.randrange(3)] * rng.randint(0, 2 * BLOCK) for cut in rng.choices(cuts, k=25)]
    rng.shuffle(paths)
    agrees(paths)


def test_comparing_stops_at_the_end_even_if_the_next_trajectory_goes_on_alike() -> None:
    agrees([[7] * (k * BLOCK + d) for k in (1, 2, 3) for d in (1, -2, 0, -1, -1)])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33])
def test_all_equal_keep_the_callers_order(count: int) -> None:
    order, lcp = lcp_sort(*flat([[7] * 300] * count))
    assert order.tolist() == list(range(count))
    assert lcp.tolist() == [0] + [300] * (count - 1)


def test_no_trajectory() -> None:
    order, lcp = lcp_sort(*flat([]))
    assert len(order) == len(lcp) == 0


def star(rng: random.Random) -> list[list[int]]:
    trunk = [rng.randrange(9) for _ in range(500)]
    return [[*trunk, i, *range(i % 4)] for i in range(60)]


def caterpillar(rng: random.Random) -> list[list[int]]:
    spine = [rng.randrange(1, 9) for _ in range(600)]
    return [[*spine[:cut], 0, cut] for cut in range(0, 600, 9)]


def prefixes(rng: random.Random) -> list[list[int]]:
    path = [rng.randrange(9) for _ in range(300)]
    return [path[:cut] for cut in range(1, 300, 7)]


def unrelated(rng: random.Random) -> list[list[int]]:
    return [[first, *[rng.randrange(LAST_ID) for _ in range(40)]] for first in range(50)]


@pytest.mark.parametrize("shape", [star, caterpillar, prefixes, unrelated])
@pytest.mark.parametrize("arranged", ["sorted", "reversed", "shuffled", "twice"])
def test_shape_in_any_arrangement(shape, arranged: str) -> None:
    rng = random.Random(1)
    paths = sorted(shape(rng))
    if arranged == "reversed":
        paths.reverse()
    if arranged == "twice":
        paths += paths
    if arranged in ("shuffled", "twice"):
        rng.shuffle(paths)
    agrees(paths)


@pytest.mark.parametrize(("low", "high"), [(255, 256), (65535, 65536), (2**24 - 1, 2**24), (LAST_ID - 1, LAST_ID)])
def test_order_is_of_ids_not_of_their_bytes(low: int, high: int) -> None:
    agrees([[high, 0], [low, 5], [low], [0, high], [0, low]])


def test_tokens_may_be_mapped_from_a_file_read_only_or_strided(tmp_path) -> None:
    paths = caterpillar(random.Random(2))
    tokens, offset = flat(paths)
    np.save(tmp_path / "tokens.npy", tokens)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    frozen = tokens.copy()
    frozen.flags.writeable = False
    spread = np.full(2 * len(tokens), -1, dtype=np.int32)
    spread[::2] = tokens
    for held in (mapped, frozen, spread[::2]):
        order, lcp = lcp_sort(held, offset)
        assert (order.tolist(), lcp.tolist()) == naive(paths)
    assert tokens.flags.writeable and offset.flags.writeable


def test_common_prefix_of_every_pair() -> None:
    paths = [*caterpillar(random.Random(3))[:20], *prefixes(random.Random(3))[:20]]
    for a in paths:
        for b in paths:
            assert common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)) == naive_prefix(a, b)
