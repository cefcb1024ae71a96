"""Hand-drawn cases, B = 64 unless said. Each is small enough to be checked with a pencil."""

from harts.ir import SegmentTree
from tests.forests import tree_of, tree_of_spec

B = 64


def _chain(forks: int) -> list[tuple[int, int]]:
    """A trunk that forks again and again: at each fork a side leaf of 5 and 30 more tokens of trunk."""
    spec = [(-1, 40)]
    trunk = 0
    for _ in range(forks):
        spec += [(trunk, 30), (trunk, 5)]
        trunk = len(spec) - 2
    return spec


def trees() -> dict[str, SegmentTree]:
    """Name -> tree."""
    stem = list(range(1, 71))
    return {
        # the paper's Figure 2: forks at B - 1 and B + 1
        "figure_2": tree_of_spec([(-1, 63), (0, 2), (0, 10), (1, 10), (1, 10)]),
        # the paper's Figure 3: P0 fills a chunk, the fork after P1 is inside the next one; B is the longest
        # child and continues, A and C branch
        "figure_3": tree_of_spec([(-1, 84), (0, 50), (0, 70), (0, 20)]),
        "fork_before_boundary": tree_of_spec([(-1, 63), (0, 4), (0, 4)]),
        "fork_on_boundary": tree_of_spec([(-1, 64), (0, 4), (0, 4)]),
        "fork_after_boundary": tree_of_spec([(-1, 65), (0, 4), (0, 4)]),
        # two trajectories end inside another one; they make no fork and no segment
        "strict_prefix": tree_of([stem, stem[:3], stem[:65]]),
        "duplicates": tree_of([[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]),
        "deep_chain": tree_of_spec(_chain(6)),
        "wide_fan": tree_of_spec([(-1, 70)] + [(0, length) for length in (1, 2, 3, 60, 61, 100, 1, 1)]),
        "two_trees": tree_of_spec([(-1, 66), (0, 3), (0, 3), (-1, 5)]),
    }
