"""When side branches run, from which state, and in which order sequences are numbered."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from harts.ir import RoundPlan
from harts.stages.call_plan.min_call import MinCall, plan_rounds, total_replay
from tests.forests import Spec
from tests.stages.call_plan.check import chains, check_plan
from tests.stages.call_plan.trees import caterpillar, direct_tree

B = 64


def planned(spec: Spec, chunk_size: int = B) -> RoundPlan:
    plan = plan_rounds(direct_tree(spec), chunk_size)
    check_plan(plan)
    return plan


@pytest.mark.parametrize(("fork", "replay", "rounds", "states"), [(63, 63, 1, []), (64, 0, 2, [64]), (65, 1, 2, [64])])
def test_side_branch_waits_when_fork_is_on_boundary_or_past_it(
    fork: int, replay: int, rounds: int, states: list[int]
) -> None:
    plan = planned([(-1, fork), (0, 10), (0, 10)])
    assert plan.rounds == rounds
    assert plan.replay.tolist() == [0, replay]
    assert plan.state_position.tolist() == states


def test_nested_forks_replay_from_their_own_chunks() -> None:
    plan = planned([(-1, 65), (0, 5), (1, 60), (2, 9), (2, 9), (1, 9), (0, 9)])
    assert sorted(plan.replay.tolist()) == [0, 1, 2, 6]
    assert sorted(plan.state_position.tolist()) == [64, 128]  # both side branches of the first chunk share one state
    assert plan.rounds == 2


def test_figure_2_runs_in_two_rounds() -> None:
    plan = planned([(-1, 63), (0, 2), (0, 10), (1, 10), (1, 10)])
    assert chains(plan) == [[0, 1, 3], [2], [4]]
    assert plan.sequence_round.tolist() == [0, 0, 1]
    assert plan.anchor.tolist() == [0, 0, 64]
    assert plan.initial_state.tolist() == [-1, -1, 0]
    assert (plan.state_sequence.tolist(), plan.state_position.tolist()) == ([0], [64])


def test_side_branches_in_the_same_chunk_share_the_state_that_their_parent_sequence_started_from() -> None:
    plan = planned([(-1, 70), (0, 100), (0, 20), (2, 60), (2, 6), (4, 4), (4, 4)])
    side = chains(plan).index([2, 3])
    for head in (4, 6):
        (sequence,) = (q for q, chain in enumerate(chains(plan)) if chain[0] == head)
        assert plan.initial_state[sequence] == plan.initial_state[side] >= 0
        assert plan.sequence_round[sequence] == plan.sequence_round[side]
        assert plan.anchor[sequence] == 64
    assert len(plan.state_position) == 1


def test_a_boundary_crossed_by_the_parent_is_not_ready_for_the_grandchild() -> None:
    # v1 ends in the chunk in which it starts, but that chunk's boundary is made by v0 in the same call
    plan = planned([(-1, 70), (0, 5), (1, 4), (1, 4), (0, 4)])
    assert chains(plan) == [[0, 1, 2], [3], [4]]
    assert plan.sequence_round.tolist() == [0, 1, 1]


def test_direct_continuation_is_the_first_child_that_fits() -> None:
    flat = [(-1, 100), (0, 5), (0, 5), (0, 5)]
    assert chains(planned(flat))[0] == [0, 1]
    critical = [
        (-1, 100),
        (0, 500),
        (0, 50),
        (0, 5),
        (2, 9),
        (2, 9),
    ]  # only v2 forks, past a boundary: two calls if it continues, else three
    plan = planned(critical)
    assert chains(plan)[0][:2] == [0, 2]
    assert plan.rounds == 2


def test_children_are_tried_by_falling_rows_of_their_subtrees_then_by_number() -> None:
    tree = direct_tree([(-1, 10), (0, 6), (0, 3), (0, 7), (2, 2), (2, 2), (0, 7)])  # subtrees of 6, 7, 7 and 7 rows
    assert chains(plan_rounds(tree, B)) == [[0, 2, 4], [5], [3], [6], [1]]
    assert chains(plan_rounds(tree, B, "as_listed")) == [[0, 1], [2, 4], [5], [3], [6]]


def test_sequences_of_a_round_are_in_depth_first_order_of_their_making() -> None:
    plan = planned([(-1, 10), (0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (-1, 4)])
    assert plan.rounds == 1
    assert chains(plan) == [[0, 1, 3], [4], [2, 5], [6], [7]]


def test_one_segment_is_one_sequence_from_zero() -> None:
    plan = planned([(-1, 1)])
    assert (plan.rounds, chains(plan), plan.initial_state.tolist()) == (1, [[0]], [-1])


@pytest.mark.parametrize("spine_first", [True, False])
def test_a_chain_of_200_000_segments_is_planned_in_seconds(spine_first: bool) -> None:
    tree = direct_tree(caterpillar(100_000, 3, spine_first), leaves_kept=2)
    assert len(tree.parent) > 200_000
    start = time.process_time()
    plan = plan_rounds(tree, B)
    assert time.process_time() - start < 10
    plan.verify()
    assert plan.rounds == 2
    assert int(plan.replay.sum()) == total_replay(tree, B)


def test_a_fan_of_100_000_branches_is_planned_in_seconds() -> None:
    tree = direct_tree([(-1, 100)] + [(0, 1)] * 100_000, leaves_kept=2)
    start = time.process_time()
    plan = plan_rounds(tree, B)
    assert time.process_time() - start < 10
    assert plan.rounds == 2
    assert len(plan.state_position) == 1


def test_stage_plans_with_its_chunk_size() -> None:
    tree = direct_tree([(-1, 7), (0, 3), (0, 3)])
    plan = MinCall(MinCall.Config(chunk_size=4)).run(tree)
    assert plan.digest() == plan_rounds(tree, 4).digest()
    assert plan.chunk_size == 4


def test_stage_plans_with_its_order_of_children() -> None:
    tree = direct_tree([(-1, 7), (0, 3), (0, 4)])
    plan = MinCall(MinCall.Config(chunk_size=4, children="as_listed")).run(tree)
    assert plan.digest() == plan_rounds(tree, 4, "as_listed").digest() != plan_rounds(tree, 4).digest()


@pytest.mark.parametrize("size", [0, -1, 2.0, "64", True])
def test_a_chunk_size_that_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(ValidationError, match="chunk_size"):
        MinCall.Config(chunk_size=size)  # type: ignore[arg-type]
