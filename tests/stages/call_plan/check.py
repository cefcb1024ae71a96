"""Does a plan obey the execution model? Followed token by token, as a runtime would."""

from __future__ import annotations

from itertools import pairwise

from harts.ir import RoundPlan


def check_plan(plan: RoundPlan) -> None:
    """Every state is of the path that uses it, asked for once and used; replay is what the chunk size says."""
    plan.tree.verify()
    plan.verify()
    states = list(zip(plan.state_sequence.tolist(), plan.state_position.tolist(), strict=True))
    assert states == sorted(set(states))
    assert {*range(len(states))} == {*plan.initial_state.tolist()} - {-1}
    sequences = chains(plan)
    for q, run in enumerate(sequences):
        source = int(plan.initial_state[q])
        if source >= 0:
            maker, position = states[source]
            assert _holder(plan, run[0], position - 1) in sequences[maker]
            assert position % plan.chunk_size == 0
    assert plan.replay.tolist() == [int(plan.tree.start[run[0]]) % plan.chunk_size for run in sequences]


def chains(plan: RoundPlan) -> list[list[int]]:
    """Segments of each sequence."""
    return [plan.segment[a:b].tolist() for a, b in pairwise(plan.sequence_offset.tolist())]


def _holder(plan: RoundPlan, segment: int, position: int) -> int:
    tree = plan.tree
    return next(u for u in tree.path(segment) if tree.start[u] <= position < tree.end[u])
