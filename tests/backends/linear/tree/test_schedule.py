"""Schedules of whole plans: what their tables say is what trajectories are."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.linear.tree import schedule as tree_schedule
from harts.backends.linear.tree import table
from harts.backends.linear.tree.executions import fused_schedule
from harts.backends.linear.tree.grid import CHUNK
from harts.backends.linear.tree.schedule import Schedule, Sequences, build_schedule
from harts.ir import CompactLayout
from harts.ir.runs import offsets
from tests.backends.linear.tree.cases import BOUNDARIES, FORKS, plan_of
from tests.backends.linear.tree.walk import Path, check_backward_order, check_settlements, walk
from tests.forests import paths_of, random_trajectories
from tests.parity.trees import layout_of, rows_of

HOST = torch.device("cpu")
CALL_PLANS = ("min_call", "flat", "per_segment", "no_replay")


def check(schedule: Schedule, layout: CompactLayout, *, aligned: bool = True) -> None:
    """Every compact row sees its trajectory's path, states are paths, and the backward tables mirror the forward."""
    plan = layout.plan
    wanted: dict[int, Path] = {}
    for rows in rows_of(layout).split(plan.tree.columns.length.tolist()):
        whole = rows.tolist()
        for position, row in enumerate(whole):
            assert wanted.setdefault(row, whole[: position + 1]) == whole[: position + 1]
    found = walk(schedule)
    assert found.path == wanted
    last = layout.cu_rows[plan.state_sequence + 1] - 1
    states = [wanted[row][:position] for row, position in zip(last.tolist(), plan.state_position.tolist(), strict=True)]
    assert sorted(found.bank.values()) == sorted(states)
    if aligned:
        assert not any(start % CHUNK for start in found.chunk_start.values())
    check_backward_order(schedule)
    check_settlements(schedule)


@pytest.mark.parametrize("call_plan", CALL_PLANS)
@pytest.mark.parametrize("seed", range(6))
def test_every_row_sees_the_path_of_its_trajectory(seed, call_plan):
    trajectories = random_trajectories(random.Random(seed), CHUNK, roots=1 + seed % 3, forks=2 + seed)
    layout = layout_of(trajectories, CHUNK, call_plan)
    check(fused_schedule(plan_of(layout, "cpu"), HOST), layout, aligned=call_plan != "no_replay")


@pytest.mark.parametrize("spec", [FORKS, BOUNDARIES], ids=["forks", "boundaries"])
@pytest.mark.parametrize("most", [1, 2])
def test_long_sequences_are_cut_into_spans_and_remain_what_they_are(most, spec, monkeypatch):
    layout = layout_of(paths_of([(-1, 5 * CHUNK + 3), *((v + 1, length) for v, length in spec)]), CHUNK)
    whole = fused_schedule(plan_of(layout, "cpu"), HOST)
    monkeypatch.setattr(tree_schedule, "MAX_CHUNKS", most)
    schedule = fused_schedule(plan_of(layout, "cpu"), HOST)
    assert len(schedule.spans) > len(whole.spans)
    check(schedule, layout)


def test_a_span_ends_where_the_head_does_where_a_state_is_asked_for_and_after_512_chunks():
    sequences = Sequences(
        cu_rows=np.array([0, 1100 * CHUNK + 5, 1100 * CHUNK + 25]),
        replay=np.array([0, 60]),
        replay_row=np.arange(40 * CHUNK, 40 * CHUNK + 60),
        source=np.array([-1, 0]),
        given=0,
        producer=np.array([0]),
        produced_after=np.array([40 * CHUNK]),
    )
    schedule = build_schedule(sequences, HOST)
    bounds = [0, 40, 512, 1024, 1101]
    first = [[0, a * CHUNK, min(b * CHUNK, 1100 * CHUNK + 5), a, 0 if b == 40 else -1] for a, b in pairwise(bounds)]
    # 60 replay rows and 4 own ones, then 16 own rows where they are
    second = [[1, 0, 64, 0, -1], [0, 1100 * CHUNK + 9, 1100 * CHUNK + 25, 1101, -1]]
    assert schedule.spans.tolist() == [*first, *second]
    assert schedule.forward_order.tolist() == [[0, 4, -1, -1], [4, 6, 0, 0]]
    assert schedule.backward_order.tolist() == [[4, 6, 0, 0], [0, 4, -1, -1]]


def test_a_microbatch_of_whole_trajectories_has_no_heads():
    layout = layout_of([[1, 2, 3], [4] * 200], CHUNK, "flat")
    schedule = fused_schedule(plan_of(layout, "cpu"), HOST)
    assert schedule.heads is None
    assert (schedule.slots, schedule.places) == (0, 0)
    check(schedule, layout)


def test_many_one_token_branches_share_nothing_but_their_source():
    layout = layout_of(paths_of([(-1, 65), *[(0, 1)] * 300]), CHUNK)
    schedule = fused_schedule(plan_of(layout, "cpu"), HOST)
    assert schedule.places == len(schedule.forward_order) - 1
    check(schedule, layout)


def test_tables_of_more_sequences_than_a_launch_axis_holds():
    count = 70_000
    cu_rows = offsets(np.full(count, 2, dtype=np.int64))
    none = np.zeros(0, dtype=np.int64)
    schedule = build_schedule(
        Sequences(cu_rows, np.zeros(count, dtype=np.int64), none, np.full(count, -1), 0, none, none), HOST
    )
    assert schedule.body.chunks == count
    assert schedule.spans[-1].tolist() == [0, 2 * count - 2, 2 * count, count - 1, -1]
    assert torch.equal(schedule.spans[:, table.ROW].sort().values, torch.from_numpy(cu_rows[:-1]))


def changed(tensor: Tensor, index: tuple[int, int], by: int) -> Tensor:
    copy = tensor.clone()
    copy[index] += by
    return copy


def without_a_state(schedule: Schedule) -> Schedule:
    spans = schedule.spans.clone()
    spans[spans[:, table.SLOT] == 1, table.SLOT] = -1
    return replace(schedule, spans=spans)


def sources_exchanged(schedule: Schedule) -> Schedule:
    order = schedule.forward_order.clone()
    order[:, table.SOURCE] = torch.where(order[:, table.SOURCE] >= 0, 1 - order[:, table.SOURCE], -1)
    return replace(schedule, forward_order=order)


def replay_twice(schedule: Schedule) -> Schedule:
    heads = schedule.heads
    assert heads is not None
    source = heads.gradients.source.clone()
    source[0] = source[1]
    return replace(schedule, heads=replace(heads, gradients=heads.gradients._replace(source=source)))


def own_row_of_another(schedule: Schedule) -> Schedule:
    heads = schedule.heads
    assert heads is not None
    return replace(schedule, heads=replace(heads, outputs=heads.outputs._replace(own=heads.outputs.own.flip(0))))


MUTATIONS: dict[str, Callable[[Schedule], Schedule]] = {
    "a span one row later": lambda x: replace(x, spans=changed(x.spans, (1, table.ROW), 1)),
    "a span one chunk later": lambda x: replace(x, spans=changed(x.spans, (1, table.CHUNK), 1)),
    "a span of the other buffer": lambda x: replace(x, spans=changed(x.spans, (0, table.IN_HEAD), 1)),
    "a state that nobody produces": without_a_state,
    "states of two producers exchanged": sources_exchanged,
    "consumers before producers": lambda x: replace(x, forward_order=x.forward_order.flip(0)),
    "producers before consumers on the way back": lambda x: replace(x, backward_order=x.forward_order),
    "a place of another state": lambda x: replace(x, consumers=changed(x.consumers[None], (0, 1), 1)[0]),
    "a replay row counted twice": replay_twice,
    "an output of another row": own_row_of_another,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_table_is_noticed(mutation):
    layout = layout_of(paths_of(FORKS), CHUNK)
    schedule = fused_schedule(plan_of(layout, "cpu"), HOST)
    check(schedule, layout)
    assert schedule.slots == 2
    with pytest.raises(AssertionError):
        check(MUTATIONS[mutation](schedule), layout)
