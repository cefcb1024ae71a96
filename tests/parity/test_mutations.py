"""The parity comparison has teeth: each way to break prefix sharing is seen, by far more than rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.base import RoundOutput
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PackedCall
from harts.ir import CompactLayout, PerMicrobatch
from harts.stages.restore import mapped
from harts.stages.restore.labels import Predictions, predictions
from tests.parity.cases import Case
from tests.parity.rig import faults, layouts_of, runs

CASES = {
    "kda-mla": Case(50, "kda", "mla", "softmax", "none", 1, False),
    "gdn-gqa": Case(50, "gdn", "gqa", "sigmoid", "full", 1, False),
}
CLEAR = 1e-3

Layouts = PerMicrobatch[CompactLayout]
Mutation = Callable[[pytest.MonkeyPatch, Layouts], Layouts]


def drop_state_gradient(patch: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    call = Naive.call

    def detached(self: Naive, *how: Any) -> RoundOutput:
        output, states = call(self, *how)
        return RoundOutput(output, states.detach())

    patch.setattr(Naive, "call", detached)
    return layouts


def zero_instead_of_boundary_state(patch: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    call = Naive.call

    def from_zero(self: Naive, rows: Any, packed: PackedCall, initial_state: Tensor) -> RoundOutput:
        return call(self, rows, packed, torch.zeros_like(initial_state))

    patch.setattr(Naive, "call", from_zero)
    return layouts


def skip_conv_context(_: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    return mutated(layouts, lambda layout: {"context_row": np.full_like(layout.context_row, -1)})


def count_rows_once(_: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    return mutated(layouts, lambda layout: {"multiplicity": np.minimum(layout.multiplicity, 1)})


def number_positions_by_row(_: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    return mutated(layouts, lambda layout: {"position_ids": np.arange(len(layout.position_ids))})


def shift_replay_rows(_: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    return mutated(layouts, lambda layout: {"replay_row": np.maximum(layout.replay_row - 1, 0)})


def label_by_physical_neighbour(patch: pytest.MonkeyPatch, layouts: Layouts) -> Layouts:
    def shifted(layout: CompactLayout, vocabulary: int) -> Predictions:
        wanted = predictions(layout, vocabulary)
        neighbour = np.minimum(wanted.row + 1, layout.rows - 1)
        return wanted._replace(target=layout.input_ids[neighbour].astype(np.int64))

    patch.setattr(mapped, "predictions", shifted)
    return layouts


def mutated(layouts: Layouts, change: Callable[[CompactLayout], dict[str, Any]]) -> Layouts:
    return replace(layouts, items=tuple(replace(layout, **change(layout)) for layout in layouts.items))


MUTATIONS: list[Mutation] = [
    drop_state_gradient,
    zero_instead_of_boundary_state,
    skip_conv_context,
    count_rows_once,
    number_positions_by_row,
    shift_replay_rows,
    label_by_physical_neighbour,
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_case_passes_unmutated_and_uses_what_the_mutations_break(case: Case):
    layouts = layouts_of(case, "min_call")
    (layout,) = layouts.items
    assert layout.plan.rounds > 1
    assert len(layout.plan.state_sequence) > 0
    assert len(layout.replay_row) > 0
    assert not faults(next(runs(case, layouts)), next(runs(case, layouts_of(case, "flat"))), 1e-10)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutation_is_caught(mutation: Mutation, case: Case, monkeypatch: pytest.MonkeyPatch):
    theirs = next(runs(case, layouts_of(case, "flat")))
    layouts = mutation(monkeypatch, layouts_of(case, "min_call"))
    assert faults(next(runs(case, layouts)), theirs, CLEAR)
