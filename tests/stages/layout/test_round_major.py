"""Options, limits and cost of the round-major layout."""

from __future__ import annotations

import time

import numpy as np
import pytest
from pydantic import ValidationError

from harts.errors import PlanError
from harts.ir import CompactLayout
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.layout.round_major import RoundMajor
from tests.forests import Spec, tree_of_spec
from tests.stages.call_plan.trees import caterpillar, direct_tree

FIGURE_2: Spec = ((-1, 63), (0, 2), (0, 10), (1, 10), (1, 10))


def layout_of(spec: Spec, **config: int) -> CompactLayout:
    given = {"conv_width": 4} | config
    return RoundMajor(RoundMajor.Config(**given)).run(plan_rounds(tree_of_spec(spec), 64))


def test_rows_are_not_padded_unless_asked() -> None:
    assert len(layout_of(FIGURE_2).input_ids) == 95


@pytest.mark.parametrize(("multiple", "rows"), [(1, 95), (5, 95), (64, 128), (96, 96), (1000, 1000)])
def test_rows_are_padded_to_the_multiple(multiple: int, rows: int) -> None:
    layout = layout_of(FIGURE_2, row_multiple=multiple)
    assert len(layout.input_ids) == len(layout.position_ids) == len(layout.multiplicity) == rows
    assert layout.rows == 95
    layout.verify()


def test_a_conv_of_width_1_has_no_context() -> None:
    assert layout_of(FIGURE_2, conv_width=1).context_row.shape == (3, 0)


def test_conv_context_reaches_across_segments_and_stops_at_position_0() -> None:
    context = layout_of([(-1, 2), (0, 1), (0, 4), (1, 3), (1, 3)], conv_width=5).context_row.tolist()
    assert context == [[-1] * 4, [-1, 0, 1, 2], [-1, -1, 0, 1]]


def test_trees_of_a_forest_share_no_view() -> None:
    layout = layout_of([(-1, 5), (-1, 7)])
    assert layout.cu_rows.tolist() == [0, 5, 12]
    assert layout.context_row.tolist() == [[-1] * 3] * 2
    assert len(layout.ancestor_row) == 0
    assert len(layout.replay_row) == 0


def test_expanded_ancestor_rows_are_capped_with_the_numbers() -> None:
    assert layout_of(FIGURE_2, max_expanded_rows=223).rows == 95  # 75 + 73 + 75
    told = r"max_expanded_rows.* 95 compact tokens in 3 branches have 223 rows, allowed are 222"
    with pytest.raises(PlanError, match=told):
        layout_of(FIGURE_2, max_expanded_rows=222)


def test_replay_over_the_cap_is_refused_with_the_numbers() -> None:
    assert layout_of(FIGURE_2, max_replay_rows=64).rows == 95  # 63 + 1
    told = r"max_replay_rows.* 95 compact tokens in 3 branches replay 64 rows, allowed are 63"
    with pytest.raises(PlanError, match=told):
        layout_of(FIGURE_2, max_replay_rows=63)


@pytest.mark.parametrize("field", ["conv_width", "row_multiple", "max_expanded_rows", "max_replay_rows"])
def test_a_size_that_is_not_positive_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        RoundMajor.Config(**({"conv_width": 4} | {field: 0}))


@pytest.mark.parametrize("spine_first", [True, False])
def test_a_tree_20_000_forks_deep_is_laid_out_in_seconds_and_without_long_run_lists(spine_first: bool) -> None:
    tree = direct_tree(caterpillar(20_000, 100, spine_first), leaves_kept=2)
    plan = plan_rounds(tree, 64)
    start = time.process_time()
    layout = RoundMajor(RoundMajor.Config(conv_width=4)).run(plan)
    assert time.process_time() - start < 10
    assert len(layout.ancestor_row) == 20_000
    assert int(layout.ancestor_length.sum()) == int(tree.start[plan.head].sum())
    assert layout.semantic_map.run_row.size < 10
    np.testing.assert_array_equal(np.diff(layout.replay_offset), plan.replay)


def test_equal_plans_have_equal_layouts() -> None:
    assert layout_of(FIGURE_2).digest() == layout_of(FIGURE_2).digest()
