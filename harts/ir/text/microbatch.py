"""Text of what one microbatch is: its segments, its rounds and its rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harts.ir.base import Int64
from harts.ir.layout import CompactLayout
from harts.ir.round_plan import RoundPlan
from harts.ir.segment_tree import SegmentTree
from harts.ir.semantic_map import SemanticMap
from harts.ir.subtrees import subtree_sums
from harts.ir.text.pieces import repeats, spans, word, wrapped

DEEPEST_INDENT = 24
"""Levels that are drawn by indentation; deeper segments name their depth."""
TOKENS_SHOWN = 4


def segment_tree(tree: SegmentTree) -> Iterator[str]:
    """One line a segment in depth-first order: positions, multiplicity, first tokens, who ends where."""
    count, length = len(tree.parent), tree.columns.length.tolist()
    sizes = f"V={count} N={len(tree.key)} C={len(tree.tokens)} S={tree.semantic_tokens}"
    yield f"segment_tree v{tree.version}  {sizes}"
    endings: list[list[str]] = [[] for _ in range(count)]
    for tail, name, size in zip(tree.tail.tolist(), tree.columns.names, length, strict=True):
        endings[tail].append(f"{word(name)} at {size}")
    through = _through(tree)
    start, end, offset = tree.start.tolist(), tree.end.tolist(), tree.offset.tolist()
    for segment, depth in _preorder(tree):
        mark = f"(depth {depth}) " if depth > DEEPEST_INDENT else ""
        first, past = offset[segment], offset[segment + 1]
        tokens = " ".join(map(str, tree.tokens[first : min(past, first + TOKENS_SHOWN)].tolist()))
        more = " ..." if past - first > TOKENS_SHOWN else ""
        head = f"{mark}v{segment}[{start[segment]}:{end[segment]}] q={through[segment]}, tokens {tokens}{more}"
        yield from wrapped(2 + 2 * min(depth, DEEPEST_INDENT), _with_endings(head, endings[segment]))


def _with_endings(head: str, ends: list[str]) -> list[str]:
    if not ends:
        return [head]
    return [head + ", ends", *(each + "," for each in ends[:-1]), ends[-1]]


def _through(tree: SegmentTree) -> list[int]:
    """Trajectories that pass through the first token of each segment."""
    through: list[int] = subtree_sums(tree.parent, np.bincount(tree.tail, minlength=len(tree.parent))).tolist()
    return through


def _preorder(tree: SegmentTree) -> Iterator[tuple[int, int]]:
    """(segment, depth) depth first, children in ascending order."""
    offset, child = (array.tolist() for array in tree.children)
    stack = [(root, 0) for root in reversed(tree.roots.tolist())]
    while stack:
        segment, depth = stack.pop()
        yield segment, depth
        below = child[offset[segment] : offset[segment + 1]]
        stack.extend((each, depth + 1) for each in reversed(below))


def round_plan(plan: RoundPlan) -> Iterator[str]:
    """One line an input sequence, round by round: segments, initial state, replay, returned states."""
    sizes = f"B={plan.chunk_size} V={len(plan.segment)} Q={len(plan.anchor)} P={len(plan.state_sequence)}"
    yield f"round_plan v{plan.version}  {sizes}"
    returned: dict[int, list[str]] = {}
    states = zip(plan.state_sequence.tolist(), plan.state_position.tolist(), strict=True)
    for state, (sequence, position) in enumerate(states):
        returned.setdefault(sequence, []).append(f"s{state} at {position}")
    start, end, bounds = plan.tree.start.tolist(), plan.tree.end.tolist(), plan.sequence_offset.tolist()
    segments, anchor, source = plan.segment.tolist(), plan.anchor.tolist(), plan.initial_state.tolist()
    for r, sequence in _by_round(plan):
        if sequence < 0:
            yield f"  round {r + 1}"
            continue
        run = segments[bounds[sequence] : bounds[sequence + 1]]
        parts = [f"v{v}[{start[v]}:{end[v]}]" for v in run]
        facts = ["from zero" if source[sequence] < 0 else f"from s{source[sequence]}"]
        if start[run[0]] > anchor[sequence]:
            facts.append(f"replay {anchor[sequence]}:{start[run[0]]}")
        facts += ["returns " + state for state in returned.get(sequence, [])[:1]]
        facts += returned.get(sequence, [])[1:]
        yield from wrapped(4, [f"q{sequence}:", *parts[:-1], ", ".join([parts[-1], *facts])])


def _by_round(plan: RoundPlan) -> Iterator[tuple[int, int]]:
    """(round, -1) before the (round, sequence) of each round."""
    bounds = plan.round_offset.tolist()
    for r in range(plan.rounds):
        yield r, -1
        for sequence in range(bounds[r], bounds[r + 1]):
            yield r, sequence


def compact_layout(layout: CompactLayout) -> Iterator[str]:
    """Rows, positions, multiplicities, replay, conv context and ancestor runs of each sequence; then the map."""
    plan, total = layout.plan, len(layout.input_ids)
    yield f"compact_layout v{layout.version}  C={layout.rows} R={total} Q={len(plan.anchor)}"
    for r, sequence in _by_round(plan):
        if sequence < 0:
            yield f"  round {r + 1}"
        else:
            yield from _sequence(layout, sequence)
    if total > layout.rows:
        yield f"  padding {layout.rows}:{total}"
    yield "  semantic_map"
    yield from _map_rows(4, layout.semantic_map, [word(name) for name in plan.tree.columns.names])


def _sequence(layout: CompactLayout, sequence: int) -> Iterator[str]:
    first, past = layout.cu_rows[sequence : sequence + 2].tolist()
    positions, counts = spans(layout.position_ids[first:past]), repeats(layout.multiplicity[first:past])
    head = [f"q{sequence}:", f"rows {first}:{past}, positions", *positions[:-1], positions[-1] + ", multiplicity"]
    yield from wrapped(4, [*head, *counts])
    begin, stop = layout.plan.sequence_offset[sequence : sequence + 2].tolist()
    run = layout.plan.segment[begin:stop]
    pairs = zip(run.tolist(), layout.segment_row[run].tolist(), strict=True)
    yield from wrapped(6, ["segments", *(f"v{segment}@{row}" for segment, row in pairs)])
    replay = layout.replay_row[layout.replay_offset[sequence] : layout.replay_offset[sequence + 1]]
    if len(replay):
        yield from wrapped(6, ["replay", *spans(replay)])
    context = layout.context_row[sequence].tolist()
    yield from wrapped(6, ["context", *("-" if row < 0 else str(row) for row in context)])
    view = slice(layout.ancestor_offset[sequence], layout.ancestor_offset[sequence + 1])
    if view.start < view.stop:
        yield from wrapped(6, ["ancestors", *_runs(layout.ancestor_row[view], layout.ancestor_length[view])])


def _runs(row: Int64, length: Int64) -> list[str]:
    return [f"{first}:{first + size}" for first, size in zip(row.tolist(), length.tolist(), strict=True)]


def semantic_map(mapping: SemanticMap) -> Iterator[str]:
    """Row runs of each trajectory."""
    count = len(mapping.run_offset) - 1
    yield f"semantic_map v{mapping.version}  N={count} M={len(mapping.run_row)} S={int(mapping.run_length.sum())}"
    yield from _map_rows(2, mapping, [f"trajectory {i}" for i in range(count)])


def _map_rows(indent: int, mapping: SemanticMap, names: list[str]) -> Iterator[str]:
    bounds, runs = mapping.run_offset.tolist(), _runs(mapping.run_row, mapping.run_length)
    for i, name in enumerate(names):
        yield from wrapped(indent, [name + ":", *runs[bounds[i] : bounds[i + 1]]])
