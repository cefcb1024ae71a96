"""Trees and plans as graphs: for networkx, and as Graphviz text."""

from __future__ import annotations

import json
from typing import Any

import networkx as nx

from harts.errors import HartsError
from harts.ir.base import Value
from harts.ir.round_plan import RoundPlan
from harts.ir.segment_tree import SegmentTree

Graph = Any
"""networkx.DiGraph; networkx has no type hints."""


def to_networkx(value: Value) -> Graph:
    """A segment tree or a round plan as a directed graph, nodes in ascending order.

    Nodes of a segment tree are its segments (start, end, tokens: how many, trajectories: names of those that end in
    it), edges go from parents to children. Nodes of a round plan are its input sequences (round from 1, segments,
    replay: rows), edges are state hand-offs (state, position).

    Raises:
        HartsError: the value is of another kind.
    """
    if isinstance(value, SegmentTree):
        return _segment_graph(value)
    if isinstance(value, RoundPlan):
        return _round_graph(value)
    raise HartsError(f"{value.kind}: has no graph; known: {SegmentTree.kind}, {RoundPlan.kind}")


def _segment_graph(tree: SegmentTree) -> Graph:
    graph = nx.DiGraph(kind=tree.kind)
    ending: list[list[str]] = [[] for _ in tree.parent]
    for tail, name in zip(tree.tail.tolist(), tree.columns.names, strict=True):
        ending[tail].append(name)
    spans = zip(tree.start.tolist(), tree.end.tolist(), ending, strict=True)
    for segment, (start, end, names) in enumerate(spans):
        graph.add_node(segment, start=start, end=end, tokens=end - start, trajectories=names)
    parents = enumerate(tree.parent.tolist())
    graph.add_edges_from((parent, segment) for segment, parent in parents if parent >= 0)
    return graph


def _round_graph(plan: RoundPlan) -> Graph:
    graph = nx.DiGraph(kind=plan.kind)
    bounds, replay = plan.sequence_offset.tolist(), plan.replay.tolist()
    for sequence, when in enumerate(plan.sequence_round.tolist()):
        run = plan.segment[bounds[sequence] : bounds[sequence + 1]].tolist()
        graph.add_node(sequence, round=when + 1, segments=run, replay=replay[sequence])
    maker, position = plan.state_sequence.tolist(), plan.state_position.tolist()
    for sequence, state in enumerate(plan.initial_state.tolist()):
        if state >= 0:
            graph.add_edge(maker[state], sequence, state=state, position=position[state])
    return graph


def to_dot(value: Value) -> str:
    """Graphviz text of a segment tree or a round plan; sequences of a round stand side by side.

    Raises:
        HartsError: the value is of another kind.
    """
    graph = to_networkx(value)
    segments = isinstance(value, SegmentTree)
    lines = [f"digraph {value.kind} {{", "  rankdir=LR;", "  node [shape=box];"]
    for node, facts in graph.nodes(data=True):
        label = _segment_label(node, facts) if segments else _sequence_label(node, facts)
        lines.append(f"  {node} [label={_quoted(label)}];")
    if not segments:
        lines += _ranks(graph)
    for tail, head, facts in graph.edges(data=True):
        label = f" [label={_quoted('s{state} at {position}'.format(**facts))}]" if facts else ""
        lines.append(f"  {tail} -> {head}{label};")
    return "\n".join([*lines, "}"]) + "\n"


def _segment_label(node: int, facts: dict[str, Any]) -> str:
    return "\n".join([f"v{node} [{facts['start']}:{facts['end']}]", *facts["trajectories"]])


def _sequence_label(node: int, facts: dict[str, Any]) -> str:
    replay = [f"replay {facts['replay']}"] if facts["replay"] else []
    return "\n".join([f"q{node}", " ".join(f"v{segment}" for segment in facts["segments"]), *replay])


def _ranks(graph: Graph) -> list[str]:
    rounds: dict[int, list[str]] = {}
    for node, when in graph.nodes(data="round"):
        rounds.setdefault(when, []).append(str(node))
    return [f"  {{ rank=same; {'; '.join(nodes)}; }}  // round {when}" for when, nodes in rounds.items()]


def _quoted(label: str) -> str:
    """A quoted Graphviz string; other characters than ASCII stay as they are."""
    return json.dumps(label, ensure_ascii=False)
