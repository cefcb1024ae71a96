"""Trees and plans as graphs."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from harts.errors import HartsError
from harts.ir.codec import decode, encode
from harts.ir.graph import to_dot, to_networkx
from tests.forests import tree_of
from tests.ir import cases


def test_segment_tree_as_a_graph() -> None:
    graph = to_networkx(cases.tree())
    assert nx.is_arborescence(graph)
    assert sorted(graph.edges) == [(0, 1), (0, 4), (1, 2), (1, 3)]
    assert graph.nodes[1] == {"start": 63, "end": 65, "tokens": 2, "trajectories": []}
    assert graph.nodes[4] == {"start": 63, "end": 73, "tokens": 10, "trajectories": ["t0"]}


def test_round_plan_as_a_graph() -> None:
    graph = to_networkx(cases.plan())
    assert list(graph.edges(data=True)) == [(0, 2, {"state": 0, "position": 64})]
    assert dict(graph.nodes(data="round")) == {0: 1, 1: 1, 2: 2}
    assert graph.nodes[1] == {"round": 1, "segments": [4], "replay": 63}


def test_other_kinds_have_no_graph() -> None:
    for draw in (to_networkx, to_dot):
        with pytest.raises(HartsError, match="step_plan: has no graph; known: segment_tree, round_plan"):
            draw(cases.step())


def test_dot_of_a_tree_is_deterministic() -> None:
    expected = """\
digraph segment_tree {
  rankdir=LR;
  node [shape=box];
  0 [label="v0 [0:63]"];
  1 [label="v1 [63:65]"];
  2 [label="v2 [65:75]\\nt1"];
  3 [label="v3 [65:75]\\nt2"];
  4 [label="v4 [63:73]\\nt0"];
  0 -> 1;
  0 -> 4;
  1 -> 2;
  1 -> 3;
}
"""
    assert to_dot(cases.tree()) == expected
    assert to_dot(decode(encode(cases.tree()))) == expected


def test_dot_of_a_plan_shows_rounds_and_hand_offs() -> None:
    lines = to_dot(cases.plan()).splitlines()
    assert lines[3:9] == [
        '  0 [label="q0\\nv0 v1 v2"];',
        '  1 [label="q1\\nv4\\nreplay 63"];',
        '  2 [label="q2\\nv3\\nreplay 1"];',
        "  { rank=same; 0; 1; }  // round 1",
        "  { rank=same; 2; }  // round 2",
        '  0 -> 2 [label="s0 at 64"];',
    ]


def test_names_are_quoted() -> None:
    tree = tree_of([[1]])
    odd = replace(tree, columns=replace(tree.columns, names=('say "hi"];',)))
    assert '  0 [label="v0 [0:1]\\nsay \\"hi\\"];"];' in to_dot(odd).splitlines()
