"""One small hand-made value of every kind: three trajectories that fork at 63 and at 65, chunks of 64."""

from __future__ import annotations

import numpy as np

from harts.ir import (
    CompactLayout,
    CompactOutputs,
    CompactTrie,
    Partitions,
    PerMicrobatch,
    RoundPlan,
    SegmentTree,
    SemanticMap,
    SemanticOutputs,
    StepPlan,
    Value,
)
from harts.ir.base import Int64
from tests.forests import paths_of, tree_of_spec, trie_of

SPEC = ((-1, 63), (0, 2), (0, 10), (1, 10), (1, 10))
BRANCH = 7


def ints(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def small(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def tree() -> SegmentTree:
    """v0[0:63] with v1[63:65] and v4[63:73]; v1 with v2 and v3 [65:75]: segments in depth-first order."""
    return tree_of_spec(SPEC)


def plan() -> RoundPlan:
    return RoundPlan(
        tree=tree(),
        chunk_size=64,
        round_offset=ints(0, 2, 3),
        sequence_offset=ints(0, 3, 4, 5),
        segment=small(0, 1, 2, 4, 3),
        anchor=ints(0, 0, 64),
        initial_state=small(-1, -1, 0),
        state_sequence=small(0),
        state_position=ints(64),
    )


def semantic_map() -> SemanticMap:
    return SemanticMap(ints(0, 2, 3, 5), ints(0, 75, 0, 0, 85), ints(63, 10, 75, 65, 10))


def layout() -> CompactLayout:
    made = plan()
    mapping = semantic_map()
    padding = 1
    pads = np.zeros(padding, dtype=np.int64)
    order = made.segment
    offset = made.tree.offset
    rows = np.concatenate([np.arange(offset[v], offset[v + 1]) for v in order])
    positions = np.concatenate([np.arange(made.tree.start[v], made.tree.end[v]) for v in order])
    counts = np.bincount(mapping.rows(), minlength=95 + padding)
    return CompactLayout(
        plan=made,
        semantic_map=mapping,
        rows=95,
        input_ids=np.concatenate([made.tree.tokens[rows], pads.astype(np.int32)]),
        position_ids=np.concatenate([positions, pads]),
        multiplicity=counts.astype(np.int64),
        segment_row=ints(0, 63, 65, 85, 75),
        cu_rows=ints(0, 75, 85, 95),
        replay_offset=ints(0, 0, 63, 64),
        replay_row=np.concatenate([np.arange(63), [64]]).astype(np.int64),
        context_row=np.array([[-1, -1, -1], [60, 61, 62], [62, 63, 64]], dtype=np.int64),
        ancestor_offset=ints(0, 0, 1, 2),
        ancestor_row=ints(0, 0),
        ancestor_length=ints(63, 65),
    )


def trie() -> CompactTrie:
    return trie_of(paths_of(SPEC), advantages=np.linspace(-1.0, 1.0, 223), reward=np.array([1.0, np.nan, -0.5]))


def partitions() -> Partitions:
    micro = np.array([[0, 0, 0], [0, 0, 1]], dtype=np.int32)
    return Partitions(
        trie(),
        capacity=None,
        replicas=1,
        objective="paper",
        lower_bound=95,
        unit="compact tokens",
        names=("whole", "cut one"),
        microbatch=micro,
        cost=ints(95, 85, 73),
    )


def step() -> StepPlan:
    return StepPlan(
        source="test",
        capacity=100,
        replicas=1,
        microbatch=small(0, 0, 0),
        work=ints(95),
        cost=ints(95),
        unit="compact tokens",
        objective="paper",
        lower_bound=95,
        candidates=("cut one", "whole"),
        scores=np.array([[148, 148, 148], [95, 95, 95]], dtype=np.int64),
        chosen=1,
        semantic_tokens=223,
        compact_tokens=95,
        trained_tokens=220,
        trained_trajectories=3,
    )


def per_microbatch() -> PerMicrobatch[Value]:
    return PerMicrobatch(step(), (plan(),))


def outputs() -> CompactOutputs:
    hidden = np.linspace(-2.0, 2.0, 96 * 4, dtype=np.float32).reshape(96, 4)
    load = np.array([[200.0, 246.0]], dtype=np.float32)
    return CompactOutputs(layout(), hidden, router_z=np.array(0.5, dtype=np.float32), expert_load=load)


def semantic_outputs() -> SemanticOutputs:
    logprobs = -np.linspace(0.0, 3.0, 220)
    logprobs[7] = np.nan
    return SemanticOutputs(outputs(), logprobs)


def every_kind() -> dict[str, Value]:
    made = [
        trie().batch.columns,
        trie().batch,
        trie(),
        partitions(),
        step(),
        per_microbatch(),
        tree(),
        plan(),
        semantic_map(),
        layout(),
        outputs(),
        semantic_outputs(),
    ]
    return {value.kind: value for value in made}
