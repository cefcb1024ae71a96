"""Every view of a layout against its meaning on random forests, for every call plan."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from harts.ir import CompactLayout
from harts.ir.runs import expand_runs
from harts.registry import names, resolve
from harts.stages.layout.round_major import RoundMajor
from tests.forests import random_trajectories, tree_of
from tests.stages.layout.by_position import Paths, seen_by_views

Case = tuple[CompactLayout, list[list[int]]]
ROW_MULTIPLE = 64


@pytest.fixture(scope="module", params=sorted(names("call_plan")))
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """Layouts of random forests with their trajectories in the caller's order."""
    rng, made = random.Random(request.param), []
    for number in range(40):
        chunk = rng.randint(2, 8)
        trajectories = random_trajectories(rng, chunk, roots=rng.randint(1, 3), forks=rng.randint(0, 8))
        stage = resolve("call_plan", request.param)
        plan = stage(stage.Config(chunk_size=chunk)).run(tree_of(trajectories))
        config = RoundMajor.Config(conv_width=1 + number % 5, row_multiple=ROW_MULTIPLE)
        made.append((RoundMajor(config).run(plan), trajectories))
    return made


def test_layouts_hold_every_invariant(cases: list[Case]) -> None:
    for layout, _ in cases:
        layout.verify()
        layout.semantic_map.verify()


def test_rows_carry_the_tokens_and_positions_of_their_segments(cases: list[Case]) -> None:
    for layout, _ in cases:
        paths = Paths(layout)
        assert layout.input_ids[: layout.rows].tolist() == [prefix[-1] for prefix in paths.row]
        assert layout.position_ids[: layout.rows].tolist() == [len(prefix) - 1 for prefix in paths.row]
        first = [paths.path_of[v, start] for v, start in enumerate(layout.plan.tree.start.tolist())]
        assert layout.segment_row.tolist() == first


def test_rows_of_a_sequence_and_sequences_of_a_round_are_contiguous(cases: list[Case]) -> None:
    for layout, _ in cases:
        plan = layout.plan
        sequence_of = np.repeat(np.arange(len(plan.anchor)), np.diff(plan.sequence_offset))
        owner = np.repeat(sequence_of, plan.tree.length[plan.segment])
        np.testing.assert_array_equal(owner, np.repeat(np.arange(len(plan.anchor)), np.diff(layout.cu_rows)))
        assert (np.diff(plan.sequence_round[owner]) >= 0).all()


def test_queries_see_exactly_their_ancestors_and_themselves(cases: list[Case]) -> None:
    for layout, _ in cases:
        seen = seen_by_views(layout)
        np.testing.assert_array_equal(seen[: layout.rows, : layout.rows], Paths(layout).visible())
        assert not seen[layout.rows :].any()
        assert not seen[:, layout.rows :].any()


def test_ancestor_runs_are_merged_and_oldest_first(cases: list[Case]) -> None:
    for layout, _ in cases:
        inner = np.ones(len(layout.ancestor_row), dtype=np.bool_)
        inner[layout.ancestor_offset[:-1][np.diff(layout.ancestor_offset) > 0]] = False
        stop = layout.ancestor_row + layout.ancestor_length
        touching = layout.ancestor_row[1:] == stop[:-1]
        assert not (touching & inner[1:]).any()
        for q in range(len(layout.plan.anchor)):
            a, b = layout.ancestor_offset[q : q + 2]
            rows = expand_runs(layout.ancestor_row[a:b], layout.ancestor_length[a:b])
            assert layout.position_ids[rows].tolist() == list(range(len(rows)))


def test_conv_context_is_the_last_true_ancestors(cases: list[Case]) -> None:
    for number, (layout, _) in enumerate(cases):
        width, paths = number % 5, Paths(layout)
        assert layout.context_row.shape == (len(layout.plan.anchor), width)
        for q, head in enumerate(layout.plan.head.tolist()):
            before = paths.up_to(head, int(layout.plan.tree.start[head]))
            wanted = ([-1] * width + before)[len(before) :] if width else []
            assert layout.context_row[q].tolist() == wanted


def test_replay_rows_are_the_path_from_the_anchor_to_the_fork(cases: list[Case]) -> None:
    for layout, _ in cases:
        paths, plan = Paths(layout), layout.plan
        for q, head in enumerate(plan.head.tolist()):
            before = paths.up_to(head, int(plan.tree.start[head]))
            a, b = layout.replay_offset[q : q + 2]
            assert layout.replay_row[a:b].tolist() == before[int(plan.anchor[q]) :]


def test_semantic_map_gives_back_every_trajectory_in_the_callers_order(cases: list[Case]) -> None:
    for layout, trajectories in cases:
        rows = layout.semantic_map.rows()
        assert layout.input_ids[rows].tolist() == [token for tokens in trajectories for token in tokens]
        assert layout.position_ids[rows].tolist() == [i for tokens in trajectories for i in range(len(tokens))]
        starts = np.cumsum([0] + [len(tokens) for tokens in trajectories[:-1]])
        prefix = Paths(layout).row
        for start, tokens in zip(starts.tolist(), trajectories, strict=True):
            assert prefix[rows[start + len(tokens) - 1]] == tuple(tokens)


def test_multiplicity_counts_the_positions_of_a_row_and_is_0_on_padding(cases: list[Case]) -> None:
    padded = 0
    for layout, _ in cases:
        counted = Counter(layout.semantic_map.rows().tolist())
        assert layout.multiplicity.tolist() == [counted[row] for row in range(len(layout.input_ids))]
        padding = slice(layout.rows, None)
        assert not layout.multiplicity[padding].any()
        assert not layout.input_ids[padding].any()
        assert not layout.position_ids[padding].any()
        padded += len(layout.input_ids) - layout.rows
    assert padded > 0


def test_padding_rows_are_fewer_than_the_multiple_and_in_no_view(cases: list[Case]) -> None:
    for layout, _ in cases:
        total = len(layout.input_ids)
        assert total % ROW_MULTIPLE == 0
        assert total - layout.rows < ROW_MULTIPLE
        ancestors = expand_runs(layout.ancestor_row, layout.ancestor_length)
        for view in (ancestors, layout.replay_row, layout.context_row.ravel(), layout.semantic_map.rows()):
            assert (view < layout.rows).all()
