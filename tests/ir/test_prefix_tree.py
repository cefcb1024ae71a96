"""The compressed trie equals one that is made token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from harts.ir.prefix_tree import PrefixTree, prefix_tree
from tests.forests import trie_of
from tests.stages.partition.naive import sorted_tokens, tries


def tree_of_tokens(tokens: list[list[int]]) -> PrefixTree:
    trie = trie_of(tokens)
    return prefix_tree(trie.length, trie.lcp)


def naive_tree(trajectories: list[tuple[int, ...]]) -> list[tuple[int, int, int, int, int]]:
    """(end, tokens, size, parent, leaf) of each node in postorder, from sorted token lists."""
    nodes: list[list[int]] = []

    def close(end: int, above: int, first: int, children: list[int], leaf: int) -> int:
        for child in children:
            nodes[child][3] = len(nodes)
        nodes.append([end, end - above, len(nodes) - first + 1, -1, leaf])
        return len(nodes) - 1

    def fork(depth: int, above: int, inside: range) -> int:
        """The node of the first `depth` tokens, which all of `inside` share and part after."""
        first = len(nodes)
        children = [close(depth, depth, len(nodes), [], i) for i in inside if len(trajectories[i]) == depth]
        for token in sorted({trajectories[i][depth] for i in inside if len(trajectories[i]) > depth}):
            branch = [i for i in inside if len(trajectories[i]) > depth and trajectories[i][depth] == token]
            children.append(child(depth, range(branch[0], branch[-1] + 1)))
        return close(depth, above, first, children, -1)

    def child(above: int, inside: range) -> int:
        if len(inside) == 1:
            return close(len(trajectories[inside[0]]), above, len(nodes), [], inside[0])
        depth = above + 1
        while len({trajectories[i][: depth + 1] for i in inside}) == 1 and len(trajectories[inside[0]]) > depth:
            depth += 1
        return fork(depth, above, inside)

    fork(0, 0, range(len(trajectories)))
    return [(end, tokens, size, parent, leaf) for end, tokens, size, parent, leaf in nodes]


def rows(tree: PrefixTree) -> list[tuple[int, ...]]:
    return list(zip(*(field.tolist() for field in tree), strict=True))


def test_tree_equals_the_naive_one_on_every_shape():
    for name, _, trie in tries(range(60)):
        assert rows(prefix_tree(trie.length, trie.lcp)) == naive_tree(sorted_tokens(trie)), name


def test_tree_equals_the_naive_one_on_dense_random_tokens():
    rng = random.Random(11)
    for _ in range(300):
        tokens = [[rng.randint(1, 2) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 25))]
        assert rows(tree_of_tokens(tokens)) == naive_tree(sorted_tokens(trie_of(tokens))), tokens


def test_runs_add_up_to_the_compact_tokens_and_paths_to_the_lengths():
    for name, _, trie in tries(range(20)):
        tree = prefix_tree(trie.length, trie.lcp)
        assert tree.tokens.sum() == trie.compact_tokens, name
        leaves = np.flatnonzero(tree.leaf >= 0)
        assert tree.leaf[leaves].tolist() == list(range(len(trie.order))), name
        for v in leaves:
            path, node = 0, int(v)
            while node >= 0:
                path += int(tree.tokens[node])
                node = int(tree.parent[node])
            assert path == tree.end[v] == trie.length[tree.leaf[v]], name


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[5, 6, 7]], [(3, 3, 1, 1, 0), (0, 0, 2, -1, -1)]),
        ([[5], [5]], [(1, 0, 1, 2, 0), (1, 0, 1, 2, 1), (1, 1, 3, 3, -1), (0, 0, 4, -1, -1)]),
        ([[5, 6], [5]], [(1, 0, 1, 2, 0), (2, 1, 1, 2, 1), (1, 1, 3, 3, -1), (0, 0, 4, -1, -1)]),
        ([[5], [6]], [(1, 1, 1, 2, 0), (1, 1, 1, 2, 1), (0, 0, 3, -1, -1)]),
    ],
    ids=["one trajectory", "equal", "strict prefix", "nothing shared"],
)
def test_smallest_trees(tokens, expected):
    assert rows(tree_of_tokens(tokens)) == expected


def test_a_chain_of_many_nested_trajectories_is_built_in_linear_time():
    count = 200_000
    length = np.arange(1, count + 1, dtype=np.int64)
    tree = prefix_tree(length, length - 1)
    forks = np.flatnonzero(tree.leaf < 0)
    assert len(tree.end) == 2 * count
    assert tree.size[-1] == 2 * count
    assert tree.end[forks].max() == count - 1
