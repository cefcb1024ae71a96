"""Random forests: bytes, text and graphs agree with what is counted another way."""

from __future__ import annotations

import random
import re

import networkx as nx
import pytest

from harts.ir.codec import decode, encode
from harts.ir.diff import diff
from harts.ir.graph import to_networkx
from harts.ir.text import format_value
from tests.forests import random_trajectories, tree_of


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed: int) -> None:
    paths = random_trajectories(random.Random(seed), chunk=8)
    tree = tree_of(paths)
    back = decode(encode(tree))
    assert diff(tree, back) == []
    assert encode(back) == encode(tree)

    text = " ".join(line.strip() for line in format_value(tree).splitlines()[1:])
    printed = re.findall(r"v(\d+)\[(\d+):(\d+)\] q=(\d+)", text)
    passing = [set(tree.path(tail)) for tail in tree.tail.tolist()]
    expected = [
        (v, int(tree.start[v]), int(tree.end[v]), sum(v in path for path in passing)) for v in range(len(tree.parent))
    ]
    assert sorted(tuple(map(int, each)) for each in printed) == expected
    endings = {name: int(size) for name, size in re.findall(r"(t\d+) at (\d+)", text)}
    assert endings == {f"t{i}": len(path) for i, path in enumerate(paths)}

    graph = to_networkx(tree)
    assert nx.is_forest(graph.to_undirected())
    assert sum(tokens for _, tokens in graph.nodes(data="tokens")) == len(tree.tokens)
